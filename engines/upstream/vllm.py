"""VllmUpstream: a vLLM server as an engine.

| what            | from                                                                                        |
|-----------------|---------------------------------------------------------------------------------------------|
| model, context  | `/v1/models`                                                                                |
| blocks, ranks   | `vllm:cache_config_info` of `/metrics`                                                      |
| KV events       | `/kv_event_sources`, for each data-parallel rank                                            |
| tokens          | `POST /inference/v1/generate` where the server has it, else `POST /v1/completions` with ids |
| load            | `vllm:kv_cache_usage_perc` of `/metrics`                                                    |
| restarts        | `process_start_time_seconds` of `/metrics`                                                  |

Source: vllm/entrypoints/scale_out/token_in_token_out/ and vllm/entrypoints/serve/instrumentator/basic.py.
"""

from __future__ import annotations

from functools import partial
from secrets import token_hex
from typing import Any

from attrs import evolve, frozen

from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage, Unavailable
from pipeline.protocols import PreprocessedRequest
from pipeline.wire import from_json, plain_to_json

from ..llm import GenerateContext
from .errors import of_status
from .facts import EventSource, ServerFacts
from .load import ReadLoad, VllmLoad
from .prometheus_text import samples, whole
from .token_answer import TokenAnswer
from .upstream import Call, Upstream, header_value
from .vllm_logprobs import of_completion, of_generate
from .vllm_request import completion_body, generate_body, headers_of

GENERATE = "/inference/v1/generate"
"""Tokens in, tokens out."""
ABORT = "/inference/v1/abort_requests"
COMPLETIONS = "/v1/completions"


@frozen
class Routes:
    """Which of its routes a server has."""

    generates: bool = False
    """Whether it takes tokens by `/inference/v1/generate`."""
    has_tokenizer: bool = True
    """Whether it can find stop strings."""
    prioritizes: bool = True
    """Whether it takes priorities other than 0, as far as is known."""


class VllmUpstream(Upstream):
    """One vLLM server. Prompts are sent as token ids; see `Upstream` for the errors, and for what a stop does.

    A request with a LoRA name goes to that adapter. What vLLM has no option for is refused by name. Without priority
    scheduling at the server, priorities are left out.
    """

    routes = Routes()

    async def discover(self) -> ServerFacts:
        facts = _of_models(await self.page("/v1/models"), self.model, str(self.address))
        facts = _with_metrics(facts, await self._text("/metrics"))
        status, body = await self.get("/kv_event_sources")
        sources = _sources_of(body, self.address.url.host) if status == 200 else {}
        self.routes = await self._found_routes()
        return evolve(facts, event_sources=sources)

    async def adapters(self) -> tuple[str, ...]:
        return _of_models(await self.page("/v1/models"), self.known.model, str(self.address)).adapters

    async def incarnation(self) -> str | None:
        return _with_metrics(ServerFacts(model=""), await self._text("/metrics")).incarnation

    def load_reader(self, facts: ServerFacts) -> ReadLoad:
        return VllmLoad(facts).read

    def call(self, request: PreprocessedRequest, context: GenerateContext) -> Call:
        routes, facts = self.routes, self.known
        request_id = f"{header_value(context.id)}-{token_hex(4)}"  # a client may send one id twice
        make = partial(generate_body, has_tokenizer=routes.has_tokenizer) if routes.generates else completion_body
        body = make(request, facts, request_id, prioritizes=routes.prioritizes)
        read = of_generate if routes.generates else of_completion
        answer = TokenAnswer(request.sampling_options.n or 1, len(request.token_ids), read)
        path = GENERATE if routes.generates else COMPLETIONS
        headers = headers_of(request, context, request_id)
        return Call(path, plain_to_json(body), headers, answer, request_id)

    async def abort_at_server(self, call: Call) -> None:
        if self.routes.generates:
            body = {"request_ids": [_ID_PREFIX + call.request_id]}
            status, answer = await self.post(ABORT, plain_to_json(body))
            if status != 200:
                raise of_status(status, answer)

    async def _found_routes(self) -> Routes:
        """Return the routes, by a request for one token with a priority. Raise if the server sends no token ids."""
        sampling = {"max_tokens": 1, "detokenize": False}
        status, body = await self.post(
            GENERATE, plain_to_json({"token_ids": [0], "sampling_params": sampling, "priority": 1})
        )
        if status not in _NO_SUCH_ROUTE:
            stops, _ = await self.post("/abort_requests", plain_to_json({"request_ids": []}))
            return Routes(True, has_tokenizer=stops != 200, prioritizes=_may_prioritize(status, body))
        probe = {"model": self.model, "prompt": [0], "max_tokens": 1, "return_token_ids": True}
        status, body = await self.post(COMPLETIONS, plain_to_json(probe | {"priority": 1}))
        if not (prioritizes := _may_prioritize(status, body)):
            status, body = await self.post(COMPLETIONS, plain_to_json(probe))
        if status != 200:
            raise of_status(status, body)
        try:
            sends_ids = "token_ids" in _object(body, COMPLETIONS)["choices"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise InvalidMessage(f"{COMPLETIONS} gives no completion", cause=error) from error
        if not sends_ids:
            raise InvalidArgument(f"{self.address} sends no token ids: its vLLM is too old", field="upstream")
        return Routes(prioritizes=prioritizes)

    async def _text(self, path: str) -> str:
        status, body = await self.get(path)
        if status != 200:
            raise of_status(status, body)
        return body.decode("utf-8", "replace")


_NO_SUCH_ROUTE = (403, 404, 405, 501)
"""403: the route is there and switched off, without `--enable-scale-out`."""
_ID_PREFIX = "generate-tokens-"
"""What the server puts before the id of a request: an abort needs it."""


def _may_prioritize(status: int, body: bytes) -> bool:
    """Return whether the server took a priority. Raise the error of a server that refused for another reason."""
    if status == 200:
        return True
    error = of_status(status, body)
    if status == 400 and "riority" in error.message:
        return False
    raise error


def _of_models(plain: Any, wanted: str | None, address: str) -> ServerFacts:
    """Return the facts in a list of models: names of one root are aliases, those with a parent are LoRA adapters."""
    try:
        listed = [
            (str(one["id"]), one.get("root"), one.get("parent"), one.get("max_model_len")) for one in plain["data"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidMessage("/v1/models is no list of models", cause=error) from error
    models = [one for one in listed if one[2] is None]
    if not models:
        raise Unavailable(f"{address} has no model now")
    names = [name for name, *_ in models]
    if wanted is not None and wanted not in names:
        raise InvalidArgument(f"{address} has no {wanted!r}; it has {', '.join(names)}", field="model")
    model, root, _, length = next(one for one in models if wanted in (None, one[0]))
    return ServerFacts(
        model=model,
        aliases=tuple(name for name, other, *_ in models if name != model and other == root),
        adapters=tuple(name for name, _, parent, _ in listed if parent is not None),
        root=root if isinstance(root, str) else None,
        context_length=length if isinstance(length, int) else None,
    )


def _with_metrics(facts: ServerFacts, text: str) -> ServerFacts:
    """Return the facts with what the metrics show: blocks, ranks, and when the process was started."""
    infos = list(samples(text, "vllm:cache_config_info"))
    ranks = sorted({rank for one in infos if (rank := whole(one.labels.get("engine", "0"))) is not None})
    started = next(samples(text, "process_start_time_seconds"), None)
    labels = infos[0].labels if infos else {}
    return evolve(
        facts,
        block_size_tokens=whole(labels.get("block_size")) or None,
        total_blocks=whole(labels.get("num_gpu_blocks")) or None,
        data_parallel_start_rank=ranks[0] if ranks else 0,
        data_parallel_size=max(len(ranks), 1),
        incarnation=None if started is None else str(started.value),
    )


def _sources_of(body: bytes, host: str) -> dict[int, EventSource]:
    """Return the sources of KV events by rank. Raise InvalidMessage for a page of another form."""
    try:
        return {
            int(rank): EventSource(one["endpoint"], one.get("replay_endpoint"), one.get("topic") or "").at(host)
            for rank, one in _object(body, "/kv_event_sources").items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InvalidMessage("/kv_event_sources is no list of sources", cause=error) from error


def _object(body: bytes, path: str) -> dict[str, Any]:
    try:
        return from_json(body, dict[str, Any])
    except InvalidArgument as error:
        raise InvalidMessage(f"{path} is no JSON object", cause=error) from error
