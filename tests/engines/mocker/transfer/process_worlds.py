"""A mock prefill and a mock decode worker that meet over a request plane only, as in two processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Literal
from uuid import UUID

import anyio
from attrs import define, evolve, field

from engines import DisaggregationMode, ShutdownTimes, Worker, WorkerConfig
from engines.mocker import MockEngine, MockEngineArgs, TransferExchange
from pipeline import Annotated, Context
from pipeline.network import Runtime
from pipeline.protocols import BootstrapInfo, LLMEngineOutput, PreprocessedRequest, StopConditions
from tests.pipeline.network.memory_network import MemoryNetwork
from tests.pipeline.network.worlds import deployment

ARGS = MockEngineArgs(
    num_gpu_blocks=64, block_size=4, kv_bytes_per_token=1_000_000, kv_transfer_bandwidth=1.0, bootstrap_port=9000
)
PROMPT = tuple(range(10))
TIMES = ShutdownTimes(grace_s=0.0, timeout_s=5.0)


@define
class Half:
    """The chunks of one half of a request, with their times in milliseconds, and how it ended."""

    chunks: list[LLMEngineOutput] = field(factory=list)
    times_ms: list[float] = field(factory=list)
    error: Exception | None = None
    is_over: bool = False

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


@define
class Processes:
    """A prefill and a decode worker with an exchange each."""

    prefill: Worker
    decode: Worker
    network: MemoryNetwork | None = None
    """What is between them; None: nothing, all calls are function calls."""

    def worker(self, half: str) -> Worker:
        worker: Worker = getattr(self, half)
        return worker

    def engine(self, half: str) -> MockEngine:
        engine = self.worker(half).engine
        assert isinstance(engine, MockEngine)
        return engine

    def exchange(self, half: str) -> TransferExchange:
        exchange = self.engine(half).exchange
        assert exchange is not None
        return exchange

    def half_of(self, room: int, *, max_tokens: int = 6, prompt: tuple[int, ...] = PROMPT) -> Context[Any]:
        """Return one half of the request that meets in that room; both halves have its id."""
        config = self.prefill.engine_config
        assert config is not None
        assert config.bootstrap_host is not None
        assert config.bootstrap_port is not None
        info = BootstrapInfo(config.bootstrap_host, config.bootstrap_port, room, UUID(int=room))
        request = PreprocessedRequest(
            list(prompt), stop_conditions=StopConditions(max_tokens=max_tokens), bootstrap_info=info
        )
        return Context(request, id=f"request-{room}")

    async def read(self, half: str, context: Context[Any], into: Half) -> None:
        """Send that half to its worker and read its answer."""
        begun_s = anyio.current_time()
        served = self.worker(half).served
        assert served is not None
        engine = self.worker(half).runtime.requests.engine(served.instance, Annotated[LLMEngineOutput])
        try:
            async with await engine.generate(context) as stream:
                async for item in stream:
                    into.times_ms.append((anyio.current_time() - begun_s) * 1000)
                    if item.is_error:
                        into.error = item.error
                    elif item.data is not None:
                        into.chunks.append(item.data)
        except Exception as error:
            into.error = error
        finally:
            into.is_over = True

    async def read_both(self, prefill: Context[Any], decode: Context[Any]) -> tuple[Half, Half]:
        """Send both halves at the same time and read their answers."""
        sent, received = Half(), Half()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.read, "prefill", prefill, sent)
            tasks.start_soon(self.read, "decode", decode, received)
        return sent, received

    def check_empty(self, *halves: str) -> None:
        """Assert that these workers, by default both, hold no block and take part in no transfer."""
        for half in halves or ("prefill", "decode"):
            for rank in self.engine(half).ranks:
                rank.scheduler.pool.check()
                assert (rank.scheduler.pool.active, rank.live) == (0, 0), half
            exchange = self.exchange(half)
            assert (exchange.waiting, exchange.sessions) == (0, 0), half


def mock_worker(
    runtime: Runtime, half: Literal["prefill", "decode"], args: MockEngineArgs = ARGS, *, worker_id: int | None = None
) -> Worker:
    """Return a worker of that half, with an exchange of its own."""
    engine = MockEngine(evolve(args, worker_type=half))
    config = WorkerConfig(namespace="ns", component=half, disaggregation_mode=DisaggregationMode(half))
    return Worker(engine, config, runtime=runtime, worker_id=worker_id, times=TIMES, environment={})


@asynccontextmanager
async def processes(args: MockEngineArgs = ARGS) -> AsyncIterator[Processes]:
    """Both workers, of one runtime; when they end nothing may be left."""
    async with (
        Runtime.in_process(rng=Random(1)) as runtime,
        mock_worker(runtime, "prefill", args) as prefill,
        mock_worker(runtime, "decode", args) as decode,
    ):
        both = Processes(prefill, decode)
        yield both
        await anyio.wait_all_tasks_blocked()
        both.check_empty()


@asynccontextmanager
async def networked(args: MockEngineArgs = ARGS) -> AsyncIterator[Processes]:
    """Both workers, of a runtime each, with a network in memory between them."""
    async with (
        deployment() as world,
        world.runtime(rng=Random(1)) as first,
        world.runtime(rng=Random(2)) as second,
        mock_worker(first, "prefill", args) as prefill,
        mock_worker(second, "decode", args) as decode,
    ):
        yield Processes(prefill, decode, world.network)
