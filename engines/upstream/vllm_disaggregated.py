"""VllmPrefill and VllmDecode: vLLM servers that share a request, one its prompt, the other its answer.

    prefill   request ──► POST, not streamed, one token ──► chunk with what decode needs; a lease begins
    decode    request with that ──► POST ──► 200: its server renews the lease ──► first token: the blocks were fetched

| what happens                                  | what is done                                                    |
|-----------------------------------------------|-----------------------------------------------------------------|
| a stop before prefill's answer                | it is aborted; an answer that comes all the same is given back  |
| a kill or close before it                     | the connection is closed: the server frees the blocks           |
| one before decode's server has the request    | decode is sent it for one token all the same, in the background |
| one after that                                | the connection is closed: that server frees prefill's blocks    |
| the lease ends before decode's server has it  | WorkerOverloaded: the request may start again                   |
| it ends before the first token, not renewed   | the same: the tokens could be wrong                             |
| decode fails before its first token           | TransferFailed: the request may start again                     |

Given back: decode's server fetches the blocks for one token, for an abort frees none of a prefill that has ended. Where
that is not possible, blocks wait for the end of their lease: without a decode server, after a kill or close while
prefill's answer is on its way, and after an abort that meets the server between the last step of its engine and its
answer, a matter of milliseconds. Prefill's token is not passed on: decode computes it again.

Of a lease that was given in another process, decode first calls for the rest. TransferFailed where that cannot be had.

Source: vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py, request_finished.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from math import inf
from typing import Any

import anyio
from attrs import define, evolve, frozen

from pipeline import Cancelled, Control, InvalidArgument, PenstockError
from pipeline.errors import (
    BackendUnknown,
    Disconnected,
    EngineShutdown,
    InvalidMessage,
    TransferFailed,
    WorkerOverloaded,
    ungrouped,
)
from pipeline.protocols import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    SamplingOptions,
    StopConditions,
)
from pipeline.telemetry import inject
from pipeline.wire import plain_from_json, plain_to_json

from ..llm import EngineConfig, GenerateContext
from ..peers import Peers
from .client import Address, Client
from .connectors import LEASE, KvConnector, MooncakePush, NixlPull, PrefillServer, Taken
from .errors import of_one_server, of_status
from .facts import ServerFacts
from .http_exchange import Exchange, fetched
from .lease_calls import lease_engine, limit_lease
from .streamed_answer import checked_ids
from .upstream import FIND_S, Call
from .vllm import VllmUpstream

_log = logging.getLogger(__name__)

_MOONCAKE_PORT = 8998
_RETURN_S = 5.0
"""Longest wait for a decode server that only fetches blocks, so that they are freed."""
_GIVE_UP_S = 1.0
"""Longest wait for the answer to a prefill that was stopped."""
_PARAMS = "kv_transfer_params"


class VllmPrefill(VllmUpstream):
    """A vLLM server that computes prompts. One chunk ends the stream: with a token, which is not part of the answer,
    and with `disaggregated_params` for a `VllmDecode`.

    `connector` is shared with the decode workers; by default NIXL's. `bootstrap_url` is Mooncake's bootstrap server, by
    default at the server's own host. Raise as `Upstream`, and InvalidMessage if the server offers no blocks.
    """

    def __init__(
        self, url: str, *, connector: KvConnector | None = None, bootstrap_url: str | None = None, **options: Any
    ) -> None:
        super().__init__(url, **options)
        self.connector = NixlPull() if connector is None else connector
        self._bootstrap_url = bootstrap_url or f"http://{_in_url(self.address.url.host)}:{_MOONCAKE_PORT}"
        self._server: PrefillServer | None = None
        self._peer_address = ""

    async def setup_peers(self, peers: Peers) -> None:
        if self.connector.leases.duration_s < inf:
            self._peer_address = await peers.serve(lease_engine(self.connector.leases))

    async def discover(self) -> ServerFacts:
        facts = await super().discover()
        if isinstance(self.connector, MooncakePush):
            self._server = PrefillServer.parse(self._bootstrap_url, await self._bootstrapped())
        return facts

    async def start(self, worker_id: int) -> EngineConfig:
        config = await super().start(worker_id)
        config.stops_prefills = True
        return config

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if (request.sampling_options.n or 1) > 1:
            raise InvalidArgument("a prompt that another server computes has one choice", field="n")
        self.call(request, context)  # which refuses what decode could not answer, before the prompt is computed
        transfer_id, control = self.connector.transfer_id(), context.control
        call = self._prefill_call(request, context, transfer_id)
        async with Exchange(self.client, Control()) as exchange:
            try:
                answer = await self._answered_or_given_up(exchange, call, context)
                self._note_answer(request)
                chunk = self._chunk(request, answer, transfer_id)
                if not control.is_stopped:
                    yield chunk
                    return
                self._give_back(request, chunk, context)
            except Cancelled:
                pass
            except PenstockError as error:
                await self._looked(error, control)
                if not control.is_stopped:
                    raise of_one_server(error) from error.__cause__
            if not control.is_killed:
                yield _cancelled(request)

    async def _answered_or_given_up(
        self, exchange: Exchange, call: Call, context: GenerateContext
    ) -> Mapping[str, Any]:
        """Return the whole answer, also after a stop if it comes soon; else raise Cancelled. Raise as `_answered`."""
        forget = context.control.on_kill(exchange.control.kill)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._give_up_when_stopped, exchange, call, context)
                answer = await self._answered(exchange, call, inject(context.inner))
                tasks.cancel_scope.cancel()
                return answer
        except ExceptionGroup as failed:
            raise ungrouped(failed) from None
        finally:
            forget()
        raise AssertionError  # the group is left by the return, or by an error

    async def _give_up_when_stopped(self, exchange: Exchange, call: Call, context: GenerateContext) -> None:
        """End the prefill at the server after a stop. It may have ended: then its answer is on its way."""
        await context.control.stopped()
        if self.routes.generates and not context.is_killed:
            with suppress(PenstockError), anyio.move_on_after(_GIVE_UP_S):
                await self.abort_at_server(call)
                await anyio.sleep(_GIVE_UP_S)
        exchange.control.kill()

    def _give_back(self, request: PreprocessedRequest, chunk: LLMEngineOutput, context: GenerateContext) -> None:
        """Have the blocks of a prefill fetched that ended although it was stopped."""
        routing = None if request.routing is None else evolve(request.routing, dp_rank=None)
        result = PrefillResult(chunk.disaggregated_params)
        given = evolve(request, routing=routing, prefill_result=result)
        self.connector.give_back(self.known.model, given, context)

    def _prefill_call(self, request: PreprocessedRequest, context: GenerateContext, transfer_id: str) -> Call:
        """Return the request for the prompt alone: one token, which nothing ends before, however it is drawn."""
        alone = evolve(
            request,
            stop_conditions=StopConditions(max_tokens=1, ignore_eos=True),
            sampling_options=SamplingOptions(temperature=0.0),
            output_options=OutputOptions(),
        )
        call = self.call(alone, context)
        body: dict[str, Any] = plain_from_json(call.body)
        body["stream"] = False
        del body["stream_options"]
        if (params := self.connector.prefill_params(transfer_id)) is not None:
            body[_PARAMS] = body.get(_PARAMS, {}) | params
        return evolve(call, body=plain_to_json(body))

    async def _answered(self, exchange: Exchange, call: Call, trace: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the whole answer. Raise the error of one that is none."""
        status = await exchange.send("POST", call.path, {**self._headers(), **call.headers, **trace}, call.body)
        if status != 200:
            raise of_status(status, await exchange.message())
        body = await exchange.body()
        if not exchange.is_whole:
            raise Disconnected("the connection was closed before the end of the prefill's answer")
        try:
            answer = plain_from_json(body)
            choice = answer["choices"][0]
            ids, reason = choice["token_ids"], choice["finish_reason"]
        except (InvalidArgument, KeyError, IndexError, TypeError) as error:
            raise InvalidMessage("the prefill's answer has no choice", cause=error) from error
        if reason == "abort":
            raise EngineShutdown("the server gave the prefill up")
        if reason == "error":
            raise BackendUnknown("the server failed with the prefill")
        checked_ids(ids)
        plain: Mapping[str, Any] = answer
        return plain

    def _chunk(self, request: PreprocessedRequest, answer: Mapping[str, Any], transfer_id: str) -> LLMEngineOutput:
        rank = None if request.routing is None else request.routing.dp_rank
        place: Mapping[str, Any] = {"server": self._server, "dp_rank": rank or 0, "address": self._peer_address}
        offered = self.connector.offer(transfer_id, answer.get(_PARAMS), **place)
        ids: list[int] = answer["choices"][0]["token_ids"]
        usage = CompletionUsage.of(len(request.token_ids), len(ids))
        if (cached := _cached_tokens(answer)) is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached)
        return LLMEngineOutput(
            ids, finish_reason=FinishReason.LENGTH, disaggregated_params=offered, completion_usage=usage
        )

    async def _bootstrapped(self) -> Any:
        """Return what Mooncake's bootstrap server knows. Raise as `page`."""
        client = Client(Address.parse(self._bootstrap_url), FIND_S, self._transport)
        try:
            status, body = await fetched(client, "GET", "/query", {"accept": "application/json"}, within_s=FIND_S)
        finally:
            await client.aclose()
        if status != 200:
            raise of_status(status, body)
        try:
            return plain_from_json(body)
        except InvalidArgument as error:
            raise InvalidMessage(f"{self._bootstrap_url}/query is no JSON", cause=error) from error


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    try:
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    except (KeyError, IndexError, TypeError):
        return None
    return cached if type(cached) is int else None


def _cancelled(request: PreprocessedRequest) -> LLMEngineOutput:
    return LLMEngineOutput.cancelled().with_usage(CompletionUsage.of(len(request.token_ids), 0))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@define(eq=False)
class _Handed:
    """A request whose blocks come from another server."""

    taken: Taken
    is_accepted: bool = False
    """Whether the server has the request."""
    waiting: anyio.CancelScope | None = None
    """The wait for the first token, which ends with the lease."""


@frozen
class _DecodeCall(Call):
    handed: _Handed | None = None


class VllmDecode(VllmUpstream):
    """A vLLM server that answers requests whose prompts a `VllmPrefill` has computed; others it answers alone.

    `connector` is that of the prefill workers, so that the time since their answers counts. Raise as `Upstream`;
    WorkerOverloaded once the prefill server may have freed the blocks, and TransferFailed if the server fails before
    its first token. While `background` runs, a request that is stopped or closed before the server has it is sent for
    one token, so that prefill's blocks do not wait for their lease to end.
    """

    def __init__(self, url: str, *, connector: KvConnector | None = None, **options: Any) -> None:
        super().__init__(url, **options)
        self.connector = NixlPull() if connector is None else connector
        self._handed: dict[int, _Handed] = {}
        self._peers: Peers | None = None
        self._returns: list[Call] = []
        self._has_returns: anyio.Event | None = None

    async def setup_peers(self, peers: Peers) -> None:
        self._peers = peers

    async def background(self) -> None:
        self._has_returns = anyio.Event()
        try:
            with self.connector.fetching(self.known.model, self._return):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._return_blocks)
                    await super().background()
        except ExceptionGroup as failed:
            raise ungrouped(failed) from None
        finally:
            self._has_returns = None

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[LLMEngineOutput, None]:
        if (result := request.prefill_result) is None:
            return super().generate(request, context)
        return self._continued(request, context, result)

    async def _continued(
        self, request: PreprocessedRequest, context: GenerateContext, result: PrefillResult
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Answer a request whose prompt was computed elsewhere."""
        if (request.sampling_options.n or 1) > 1:
            raise InvalidArgument("a prompt that another server computes has one choice", field="n")
        offered = result.disaggregated_params
        handed = _Handed(self.connector.take(offered))
        self._handed[id(context)] = handed
        has_failed = False
        try:
            leases = self.connector.leases
            await limit_lease(handed.taken.lease, offered.get(LEASE), leases, self._peers, context.control)
            async with aclosing(super().generate(request, context)) as chunks:
                if (first := await self._first(chunks, handed)) is not None:
                    yield first
                    async for chunk in chunks:
                        yield chunk
        except Exception:
            has_failed = True
            raise
        finally:
            self.connector.done(handed.taken)
            del self._handed[id(context)]
            if not handed.is_accepted and not has_failed:
                self._return(request, context)

    def call(self, request: PreprocessedRequest, context: GenerateContext) -> Call:
        call = super().call(request, context)
        handed = self._handed.get(id(context))
        return _DecodeCall(call.path, call.body, call.headers, call.answer, call.request_id, handed)

    async def _first(self, chunks: AsyncGenerator[LLMEngineOutput, None], handed: _Handed) -> LLMEngineOutput | None:
        """Return the first chunk, None after a kill. Raise WorkerOverloaded if the lease ends before it, TransferFailed
        if the server fails before it."""
        with anyio.CancelScope(deadline=handed.taken.lease.ends_s) as handed.waiting:
            try:
                return await anext(chunks, None)
            except BackendUnknown as error:  # all that vLLM sends of a transfer that failed
                raise TransferFailed(f"decode failed before its first token: {error}", cause=error) from error
        raise WorkerOverloaded("decode took longer than the prefill server keeps the prompt's KV blocks")

    async def _begin(self, exchange: Exchange, call: Call, trace: Mapping[str, str]) -> None:
        await super()._begin(exchange, call, trace)
        if isinstance(call, _DecodeCall) and (handed := call.handed) is not None:
            handed.is_accepted = True
            self.connector.renew(handed.taken)
            if handed.waiting is not None:
                handed.waiting.deadline = handed.taken.lease.ends_s

    # -- blocks of requests that are over before the server had them

    def _return(self, request: PreprocessedRequest, context: GenerateContext) -> None:
        assert request.prefill_result is not None
        params = request.prefill_result.disaggregated_params.get(_PARAMS)
        if params is None or self._has_returns is None:  # there are no blocks, or nothing that could fetch them
            return
        _log.debug("request %r has ended before decode; the blocks of its prompt are fetched all the same", context.id)
        stop = StopConditions(max_tokens=1, ignore_eos=True)
        self._returns.append(super().call(evolve(request, stop_conditions=stop), context))
        self._has_returns.set()

    async def _return_blocks(self) -> None:
        async with anyio.create_task_group() as tasks:
            while self._has_returns is not None:
                await self._has_returns.wait()
                self._has_returns = anyio.Event()
                calls, self._returns = self._returns, []
                for call in calls:
                    tasks.start_soon(self._fetched, call)

    async def _fetched(self, call: Call) -> None:
        """Have the server fetch the blocks. What fails is left to the end of their lease."""
        try:
            with anyio.move_on_after(_RETURN_S):
                async with Exchange(self.client, Control()) as exchange:
                    await self._begin(exchange, call, {})
                    while await exchange.read():
                        pass
        except PenstockError as error:
            _log.warning("the KV blocks of a prompt stay at its prefill server until their lease ends: %s", error)
