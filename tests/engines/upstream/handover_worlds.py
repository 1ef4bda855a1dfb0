"""Servers that share a request, prompts here and answers there, in virtual time, and the graph in front of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Generic, TypeVar

import anyio
from attrs import define, field

from engines import DisaggregationMode, LLMEngine, as_engine
from engines.standalone import StandaloneEngine
from engines.upstream import KvConnector, SglangUpstream, VllmDecode, VllmPrefill, kv_connector
from operators import Migration, PrefillRouter, PrefillSettings, PushPrefill, PushRouter
from pipeline import Annotated, Context, Segment
from pipeline.network import static_workers
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest
from pipeline.protocols.card import DisaggregatedEndpoint, ModelRuntimeConfig
from pipeline.protocols.runtime_config import STOPS_PREFILLS
from pipeline.rx import AnyIOScheduler
from tests.engines.upstream.sglang_worlds import FakeSglang, Rooms
from tests.engines.upstream.vllm_worlds import Asked, FakeVllm
from tests.engines.upstream.wire import Line, Received
from tests.engines.upstream.worlds import FakeServer, TokenServer, all_running
from tests.operators.prefill.worlds import present_workers

Half = TypeVar("Half", bound=TokenServer)
Fields = dict[str, Any]


@define(eq=False)
class Blocks:
    """The KV blocks that prefill servers keep for decode servers."""

    lease_s: float = 30.0
    held: dict[str, float] = field(factory=dict)
    """Id of the prefill's request -> when its lease ends."""
    fetched: list[str] = field(factory=list)

    @property
    def count(self) -> int:
        """Prompts whose blocks are held now."""
        return sum(ends_s > anyio.current_time() for ends_s in self.held.values())

    def hold(self, request_id: str) -> None:
        self.held[request_id] = anyio.current_time() + self.lease_s

    def renew(self, request_id: str) -> None:
        if request_id in self.held:
            self.held[request_id] = max(self.held[request_id], anyio.current_time() + self.lease_s * 2 / 3)

    def take(self, request_id: str) -> bool:
        """Fetch the blocks and free them; return False for blocks that hold something else by now."""
        self.fetched.append(request_id)
        return self.held.pop(request_id, 0.0) > anyio.current_time()


@define(eq=False)
class Begun:
    """A line whose answer has begun."""

    line: Line

    async def begin(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.line, name)


@define(eq=False)
class FakeHalf(FakeVllm):
    """A vLLM with a connector. Blocks that are fetched too late give other tokens, without an error."""

    blocks: Blocks = field(factory=Blocks)
    """Shared by both sides."""
    prefill_s: float = 0.1
    """Time of a prompt."""
    answer_s: float = 0.0
    """Time of a prefill's answer on its way: an abort finds nothing to end by then."""
    accept_s: float = 0.0
    """Time before the head of an answer."""
    queue_s: float = 0.0
    """How long a decode waits in the server's queue."""
    renews: bool = True
    """Whether a decode renews the lease while it waits."""
    answers_params: bool = True
    """Whether the server was started with a connector."""
    fails_transfers: bool = False
    """Whether it gets no blocks from another server."""

    def held_prompts(self) -> int:
        return self.blocks.count

    async def _whole(self, line: Line, asked: Asked, aborted: anyio.Event) -> None:
        with anyio.move_on_after(self.prefill_s):
            await aborted.wait()
            await line.whole(200, asked.chunk([asked.choice(0, [], "abort")]) | {"kv_transfer_params": None})
            return
        if not self.answers_params:
            asked.transfer = None
        elif (asked.transfer or {}).get("do_remote_decode"):
            self.blocks.hold((asked.transfer or {}).get("transfer_id", asked.id))
        await anyio.sleep(self.answer_s)
        await super()._whole(line, asked, aborted)

    async def _streamed(self, line: Any, asked: Asked, refused: Any, aborted: anyio.Event) -> None:
        await anyio.sleep(self.accept_s)
        if (asked.transfer or {}).get("do_remote_prefill"):
            await line.begin()
            line = Begun(line)
            if self.fails_transfers:
                await anyio.sleep(5.0)
                refused = {"message": "the transfer failed", "type": "InternalServerError", "code": 500}
            else:
                await self._fetch(asked, aborted)
        await super()._streamed(line, asked, refused, aborted)

    async def _fetch(self, asked: Asked, aborted: anyio.Event) -> None:
        """Wait in the queue, with a heartbeat each sixth of the lease, and fetch the blocks; also when aborted."""
        transfer: Mapping[str, Any] = asked.transfer or {}
        held = transfer.get("transfer_id") or transfer["remote_request_id"]
        try:
            until = anyio.current_time() + self.queue_s
            while (left := until - anyio.current_time()) > 0 and not aborted.is_set():
                with anyio.move_on_after(min(left, self.blocks.lease_s / 6)):
                    await aborted.wait()
                if self.renews:
                    self.blocks.renew(held)
        except anyio.get_cancelled_exc_class():
            self.blocks.held.pop(held, None)  # as the server does for a request that is aborted before
            raise
        if not self.blocks.take(held):
            asked.prompt = [*asked.prompt, 1]  # the answer to something else


@define(eq=False)
class FakeBootstrap(FakeHalf):
    """A server whose port for Mooncake's bootstrap is the same."""

    async def answer(self, line: Line, received: Received) -> None:
        if received.path == "/query":
            await line.whole(200, {"0": {"engine_id": "e-0", "worker_addr": {}}})
        else:
            await super().answer(line, received)


@define(eq=False)
class Halves:
    """A graph in front of servers of both halves."""

    graph: Segment[Any, Any]
    prefill: list[StandaloneEngine]
    decode: list[StandaloneEngine]
    router: PrefillRouter


@asynccontextmanager
async def halves(
    prefill: list[LLMEngine], decode: list[LLMEngine], *, migrations: int = 0, **settings: Any
) -> AsyncIterator[Halves]:
    """Open `Migration >> PrefillRouter >> PushRouter` over these engines. At its end no prefill is under way."""
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(AnyIOScheduler())
        first = [await stack.enter_async_context(as_engine(one, mode=DisaggregationMode.PREFILL)) for one in prefill]
        then = [
            await stack.enter_async_context(as_engine(one, mode=DisaggregationMode.DECODE, may_prefill=True))
            for one in decode
        ]
        ids = dict(enumerate(first, 1))
        configs = {number: card(one) for number, one in ids.items()}
        side = PushPrefill(PushRouter(static_workers(ids, name="prefill")))
        views = present_workers(*ids, configs=configs).views
        router = PrefillRouter(side, views, scheduler=scheduler, settings=PrefillSettings(**settings))
        await stack.enter_async_context(router)
        workers = static_workers(dict(enumerate(then, 11)), name="decode")
        yield Halves(Migration(migrations) >> router >> PushRouter(workers), first, then, router)
        assert router.prefills == 0


@define(eq=False)
class World(Generic[Half]):
    """A prefill server, a decode server, and the graph in front of them."""

    prefill: Half
    decode: Half
    halves: Halves

    @property
    def graph(self) -> Any:
        return self.halves.graph

    @property
    def running(self) -> tuple[int, int]:
        """Requests at the prefill server and at the decode server."""
        return len(self.prefill.running), len(self.decode.running)

    async def idle(self) -> None:
        """Nothing is under way at the servers, and no blocks are held, long before a lease ends."""
        await anyio.sleep(1.0)
        assert (self.running, self.prefill.held_prompts(), self.decode.held_prompts()) == ((0, 0), 0, 0)


@asynccontextmanager
async def vllm_world(
    connector: KvConnector | None = None,
    *,
    prefill: Fields | None = None,
    decode: Fields | None = None,
    lease_s: float = 30.0,
    kind: type[FakeHalf] = FakeHalf,
    **settings: Any,
) -> AsyncIterator[World[FakeHalf]]:
    """Two vLLM servers, by default with NIXL."""
    connector = connector or kv_connector("nixl", lease_s)
    blocks = Blocks(lease_s)
    first, then = kind(blocks=blocks, **(prefill or {})), FakeHalf(blocks=blocks, **(decode or {}))
    engines = prefill_of(first, 1, connector), decode_of(then, 2, connector)
    async with all_running(first, then), halves([engines[0]], [engines[1]], **settings) as graph:
        yield World(first, then, graph)


def prefill_of(server: FakeServer, number: int, connector: KvConnector) -> VllmPrefill:
    """The engine on a vLLM server that computes prompts."""
    return VllmPrefill(f"http://gpu-{number}:8000", connector=connector, transport=server.transport)


def decode_of(server: FakeServer, number: int, connector: KvConnector) -> VllmDecode:
    """The engine on a vLLM server that answers."""
    return VllmDecode(f"http://gpu-{number}:8000", connector=connector, transport=server.transport)


@asynccontextmanager
async def sglang_world(
    *, prefill: Fields | None = None, decode: Fields | None = None, **settings: Any
) -> AsyncIterator[World[FakeSglang]]:
    """Two SGLang servers."""
    rooms: Rooms = {}
    first = FakeSglang(mode="prefill", rooms=rooms, **(prefill or {}))
    then = FakeSglang(mode="decode", rooms=rooms, **(decode or {}))
    async with (
        all_running(first, then),
        halves([sglang_of(first, 1)], [sglang_of(then, 2)], **settings) as graph,
    ):
        yield World(first, then, graph)


def sglang_of(server: FakeSglang, number: int) -> SglangUpstream:
    """The engine on an SGLang server of either half."""
    return SglangUpstream(f"http://gpu-{number}:30000", transport=server.transport)


def card(engine: StandaloneEngine) -> ModelRuntimeConfig:
    """The settings that a worker of the engine publishes, as far as a prefill router reads them."""
    config = engine.config
    endpoint = None
    if config.bootstrap_host is not None:
        endpoint = DisaggregatedEndpoint(config.bootstrap_host, config.bootstrap_port)
    return ModelRuntimeConfig(
        disaggregated_endpoint=endpoint,
        runtime_data={STOPS_PREFILLS: config.stops_prefills},
        data_parallel_size=config.data_parallel_size or 1,
    )


async def answer_of(graph: Any, request: PreprocessedRequest | Context[PreprocessedRequest]) -> list[LLMEngineOutput]:
    """All outputs for a request. Raise the error of an error item."""
    found: list[LLMEngineOutput] = []
    context = request if isinstance(request, Context) else Context(request)
    async with await graph.generate(context) as stream:
        item: Annotated[LLMEngineOutput]
        async for item in stream:
            if item.error is not None:
                raise item.error
            if item.data is not None:
                found.append(item.data)
    return found


def is_cancelled(found: list[LLMEngineOutput]) -> bool:
    """Whether an answer ended as stopped."""
    return bool(found) and found[-1].finish_reason == FinishReason.CANCELLED


def bodies(server: FakeHalf, path: str = "/inference/v1/generate") -> list[Any]:
    """The bodies of requests for the tokens of a prompt, without those of discovery."""
    return [
        one.json
        for one in server.requests(path)
        if one.json.get("token_ids") != [0] and one.json.get("stream") is not None
    ]
