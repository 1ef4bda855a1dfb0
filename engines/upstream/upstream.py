"""Upstream: an LLMEngine whose work is done by a server over HTTP; what all kinds of servers have in common.

    start ──► discover ──► ServerFacts                       background ──► health, restarts, KV events, load
    request in tokens ──► call ──► POST ──► server           stop, kill ──► the connection is closed
    chunks            ◄── answer ◄── server-sent events ◄──

A server that is gone, or was started again, ends the engine: `background` raises, the worker leaves, and the next one
for the same address is a new instance, so routers believe none of the blocks that the old one had.
"""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Protocol

import anyio
from attrs import define, evolve, frozen

from pipeline import Cancelled, Control, InvalidArgument, PenstockError
from pipeline.errors import CannotConnect, Disconnected, InvalidMessage, ungrouped
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.telemetry import inject
from pipeline.wire import plain_from_json

from ..llm import EngineConfig, GenerateContext, LLMEngine
from ..publishing import MetricsBindings, MetricsContext, PushSource
from ..worker import health_payload
from .client import Address, Client, Transport
from .errors import of_one_server, of_status
from .facts import ServerFacts
from .http_exchange import Exchange, fetched
from .kv_events import KvEventFeeds
from .load import LoadFeed, ReadLoad
from .server_watch import ServerWatch

SILENCE_S = 600.0
"""Default of the longest wait for a server to send anything."""

FIND_S = 30.0
"""Longest wait for a page of a server, such as those of its discovery."""

ABORT_GRACE_S = 0.02
"""How long a stopped request has to close its own connection before `abort` does."""

ABORT_S = 5.0
"""Longest wait for the answer to an abort."""

LOOK_S = 1.0
"""How long a request whose connection broke waits for a look at its server."""

_log = logging.getLogger(__name__)

EVENTS = "text/event-stream"
_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]+")


class Answer(Protocol):
    """The answer to one request, while its bytes arrive."""

    is_done: bool
    """Whether every terminal chunk was returned."""

    def feed(self, data: bytes) -> Iterable[LLMEngineOutput]:
        """Return the chunks that these bytes complete. Raise the error of an answer that is one."""
        ...

    def end(self, *, whole: bool) -> Iterable[LLMEngineOutput]:
        """Return the chunks that the end of the body completes; raise unless the answer is complete."""
        ...

    def cancelled(self) -> LLMEngineOutput:
        """Return the chunk that ends an answer which was stopped here."""
        ...


@frozen
class Call:
    """One request as its server gets it, and the reader of its answer."""

    path: str
    """Path of the POST, below that of the address."""
    body: bytes
    """Body, JSON."""
    headers: Mapping[str, str]
    """Headers beside the usual ones."""
    answer: Answer
    """Reads the answer."""
    request_id: str = ""
    """Id of the request at the server."""


@define(eq=False)
class _Open:
    """A request whose answer is being read."""

    exchange: Exchange
    call: Call


class Upstream(LLMEngine):
    """One server as an engine. The first read raises the errors, typed, of whichever place the server sent them in:

    InvalidArgument for a request that cannot be sent as it is, and for the statuses 400 and 422; WorkerOverloaded for
    429, 503 and 529; StatusError for any other 3xx and 4xx; a BackendError for other 5xx and for an error within an
    answer; EngineShutdown if the server gave the answer up or its engine has ended; CannotConnect, ConnectionTimeout,
    ResponseTimeout; Disconnected and StreamIncomplete for an answer without its end; InvalidMessage for one of another
    form. A stop closes the connection, which ends the request at the server, and one more chunk, marked as cancelled,
    ends the stream; a kill does it without that chunk. `cleanup` closes every connection.

    While `background` runs, a request whose connection is refused or breaks has it look at the server's health at once,
    and raises after that. So the worker of a server that is gone has left before its requests look for another one.
    """

    ends_on_kill: ClassVar[bool] = True
    shown_texts = ("url", "model")

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        silence_s: float = SILENCE_S,
        health_every_s: float = 1.0,
        load_every_s: float = 1.0,
        transport: Transport | None = None,
    ) -> None:
        """`model` is one of the server's; by default its first. `silence_s` is the longest wait for any byte,
        `health_every_s` the time between two looks at its health, `load_every_s` at the load of a server that does not
        send it. `transport` replaces the network."""
        if not silence_s > 0:
            raise InvalidArgument(f"must be above 0, got {silence_s:g}", field="silence_s")
        if not health_every_s > 0:
            raise InvalidArgument(f"must be above 0, got {health_every_s:g}", field="health_every_s")
        if not load_every_s > 0:
            raise InvalidArgument(f"must be above 0, got {load_every_s:g}", field="load_every_s")
        self.address, self.model = Address.parse(url), model
        self._api_key, self._health_every_s, self._transport = api_key, health_every_s, transport
        self._load_every_s, self._silence_s = load_every_s, silence_s
        self.client = Client(self.address, silence_s, transport)
        self.facts: ServerFacts | None = None
        """What the server has; None before `start`."""
        self.kv_feeds: KvEventFeeds | None = None
        """The KV events of its ranks; None before `start`."""
        self.load_feed: LoadFeed | None = None
        """The load of its ranks; None before `start`."""
        self._open: dict[int, _Open] = {}
        self._watch: ServerWatch | None = None
        self.on_change: Callable[[ServerFacts], object] | None = None
        """Called with what the server has once it is seen to have other LoRA adapters, while `background` runs."""

    @property
    def in_flight(self) -> int:
        """Number of requests that have a connection, or wait for one."""
        return self.client.in_flight

    @property
    def known(self) -> ServerFacts:
        """What the server has. Raise InvalidArgument before `start`."""
        if self.facts is None:
            raise InvalidArgument(f"{self.address} was not started")
        return self.facts

    # -- what a kind of server brings

    @abstractmethod
    async def discover(self) -> ServerFacts:
        """Return what the server has. Raise as `get`, and InvalidArgument for a model that it does not have."""

    @abstractmethod
    def call(self, request: PreprocessedRequest, context: GenerateContext) -> Call:
        """Return the request as the server gets it. Raise InvalidArgument for one that it cannot answer."""

    async def incarnation(self) -> str | None:
        """Return what changes when the server is started again; None if nothing shows it."""
        return None

    async def adapters(self) -> tuple[str, ...] | None:
        """Return the names of the LoRA adapters that the server has now; None if its kind has none. Raise as `page`."""
        return None

    def load_reader(self, facts: ServerFacts) -> ReadLoad | None:
        """Return what reads the load in the server's metrics; None if they do not have it."""
        return None

    async def abort_at_server(self, call: Call) -> None:
        """End the request at a server that has a route for it; its connection is closed already."""

    def failure(self, error: PenstockError, call: Call) -> PenstockError:
        """Return the error to raise for one of a request: what one server refuses as too busy, another may take."""
        return of_one_server(error)

    # -- the engine

    async def start(self, worker_id: int) -> EngineConfig:
        self.facts = await self.discover()
        self.kv_feeds = KvEventFeeds(self.facts)
        self.load_feed = LoadFeed(self.facts, self.load_reader(self.facts))
        return self.facts.config()

    async def kv_event_sources(self) -> Sequence[PushSource]:
        return () if self.kv_feeds is None else self.kv_feeds.sources()

    async def setup_metrics(self, context: MetricsContext) -> MetricsBindings:
        if self.load_feed is None or self.kv_feeds is None:
            return MetricsBindings()
        return evolve(self.load_feed.bindings(), native_text=self.kv_feeds.metrics_text)

    async def background(self) -> None:
        """Watch the server, and follow its KV events and its load.

        Raise CannotConnect, ResponseTimeout or EngineShutdown once it is gone or started again, and as `KvEventFeeds`.
        """
        # Of their own: a new connection of the first is a new server.
        client, other = (Client(self.address, FIND_S, self._transport) for _ in range(2))
        incarnation, refresh = self.incarnation, self._find_adapters
        watch = ServerWatch(
            client, self._headers(), self.known.incarnation, incarnation, refresh, every_s=self._health_every_s
        )
        self._watch = watch
        try:
            async with aclosing(client), aclosing(other), anyio.create_task_group() as tasks:
                if self.kv_feeds is not None and self.load_feed is not None:
                    tasks.start_soon(self.kv_feeds.run)
                    tasks.start_soon(self.load_feed.run, other, self._headers(), self._load_every_s)
                await watch.run()
        except ExceptionGroup as failed:
            raise ungrouped(failed) from None
        finally:
            self._watch = None

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        call, control = self.call(request, context), context.control
        async with Exchange(self.client, control) as exchange:
            self._open[id(context)] = _Open(exchange, call)
            try:
                await self._begin(exchange, call, inject(context.inner))
                while not call.answer.is_done:
                    data = await exchange.read()
                    outputs = call.answer.feed(data) if data else call.answer.end(whole=exchange.is_whole)
                    for output in outputs:
                        if control.is_stopped:
                            raise Cancelled("the request was stopped")
                        if output.finish_reason is not None and call.answer.is_done:
                            await exchange.finish()  # behind the last chunk nothing is read
                            self._note_answer(request)
                        yield output
            except Cancelled:
                if not control.is_killed:
                    yield call.answer.cancelled()
            except PenstockError as error:
                await self._looked(error, control)
                if not control.is_stopped:
                    raise self.failure(error, call) from error.__cause__
                if not control.is_killed:
                    yield call.answer.cancelled()
            finally:
                del self._open[id(context)]

    async def abort(self, context: GenerateContext) -> None:
        """Close the connection of a request that is not being read, and end it at a server with a route for that."""
        await anyio.sleep(ABORT_GRACE_S)
        if (opened := self._open.get(id(context))) is None:
            return
        await opened.exchange.close()
        with anyio.move_on_after(ABORT_S):
            await self.abort_at_server(opened.call)

    async def cleanup(self) -> None:
        await self.client.aclose()

    async def health_check_payload(self) -> Mapping[str, Any] | None:
        return health_payload()

    # -- requests beside those for tokens

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a page. Raise CannotConnect, ConnectionTimeout, Disconnected, ResponseTimeout if it
        has not come within `FIND_S`, and InvalidMessage if it is too large."""
        return await fetched(self.client, "GET", path, self._headers(), within_s=min(FIND_S, self._silence_s))

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer to a POST of JSON. Raise as `get`, and ResponseTimeout if it has not
        come within `silence_s`: it may wait for other requests."""
        return await fetched(self.client, "POST", path, self._headers(), body, within_s=self._silence_s)

    async def page(self, path: str) -> Any:
        """Return a page's JSON. Raise the error of a status other than 200, InvalidMessage for anything else."""
        status, body = await self.get(path)
        if status != 200:
            raise of_status(status, body)
        try:
            return plain_from_json(body)
        except InvalidArgument as error:
            raise InvalidMessage(f"{path} is no JSON", cause=error) from error

    async def _begin(self, exchange: Exchange, call: Call, trace: Mapping[str, str]) -> None:
        """Return when the answer begins. Raise the error of a server that sends none."""
        headers = {**self._headers(), "accept": EVENTS, **call.headers, **trace}
        status = await exchange.send("POST", call.path, headers, call.body)
        if status != 200:
            raise of_status(status, await exchange.message())
        if exchange.content_type != EVENTS:
            kind = exchange.content_type or "something without a content type"
            raise InvalidMessage(f"expected {EVENTS}, the server sent {kind}")

    async def _find_adapters(self) -> None:
        """Find out which adapters there are now; a server that does not answer keeps those that it had."""
        try:
            names = await self.adapters()
        except PenstockError as error:
            _log.debug("the adapters of %s are not known: %s", self.address, error)
            return
        if names is not None and names != self.known.adapters:
            self.facts = evolve(self.known, adapters=names)
            _log.info("%s has the adapters %s now", self.address, ", ".join(names) or "no more")
            if self.on_change is not None:
                self.on_change(self.facts)

    async def _looked(self, error: PenstockError, control: Control) -> None:
        """Wait until the server was looked at, if that is an error of a server that is gone; a stop ends the wait."""
        if (watch := self._watch) is None or not isinstance(error, CannotConnect | Disconnected):
            return
        with anyio.move_on_after(LOOK_S) as scope:
            forget = control.on_stop(scope.cancel)
            try:
                await watch.look_now()
            finally:
                forget()

    def _note_answer(self, request: PreprocessedRequest) -> None:
        if self.kv_feeds is not None:
            dp_rank = None if request.routing is None else request.routing.dp_rank
            self.kv_feeds.note_answer(dp_rank, len(request.token_ids))

    def _headers(self) -> dict[str, str]:
        return {"content-type": "application/json", "accept": "application/json", **authorization(self._api_key)}


def header_value(text: str) -> str:
    """Return the text without characters that a header may not have."""
    return _NOT_PRINTABLE.sub("?", text.strip())


def authorization(api_key: str | None) -> dict[str, str]:
    """Return the header with an API key; none without a key."""
    return {} if api_key is None else {"authorization": header_value(f"Bearer {api_key}")}
