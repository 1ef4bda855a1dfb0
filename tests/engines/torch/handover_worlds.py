"""A prefill and a decode worker that hand caches over, by a request plane in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup
from attrs import define, evolve, field, frozen

from engines.peers import WorkerPeers
from engines.torch import HandoverTimes, HeldBlocks, KvBytes, PeerHandover
from engines.torch.kv_wire import KvPiece
from pipeline import AsyncEngine, Context, ResponseStream
from pipeline.network import EndpointId, Runtime
from pipeline.protocols import PrefillResult, PreprocessedRequest

T = TypeVar("T")
PROMPT = (3, 1, 4, 1, 5, 9)
TIMES = HandoverTimes()
HELD = HeldBlocks((7, 8), PROMPT)
Tamper = Callable[[bytes], bytes | None]
"""What becomes of a piece's frame on its way; None: nothing comes any more."""


def untouched(frame: bytes) -> bytes:
    """Return the frame."""
    return frame


@frozen
class Layout:
    layers: int = 2
    dtype: str = "float32"
    bytes_per_token: int = 64


@define(slots=False)
class Cache:
    """An engine with a cache, as its hand-over sees it; block numbers are its bytes."""

    model_name: str = "tiny"
    layout: Layout = Layout()
    released: list[HeldBlocks] = field(factory=list)
    read_s: float = 0.0
    """How long a read takes."""
    reading: int = 0
    """Reads under way."""
    most_reading: int = 0
    """The most there were at the same time."""

    @property
    def store(self) -> Cache:
        return self

    def read(self, block_ids: Sequence[int], tokens: int) -> bytes:
        size_bytes = tokens * self.layout.bytes_per_token
        return (bytes(block_ids) * (size_bytes // len(block_ids) + 1))[:size_bytes]

    async def compute(self, work: Callable[[], T]) -> T:
        self.reading += 1
        self.most_reading = max(self.most_reading, self.reading)
        await anyio.sleep(self.read_s)
        self.reading -= 1
        return work()

    def release(self, held: HeldBlocks) -> None:
        self.released.append(held)


class TamperingPeers(WorkerPeers):
    """Peers whose pieces are changed on their way; counts the calls."""

    calls = 0
    tamper: Tamper = staticmethod(untouched)

    async def engine(self, address: str, item_type: Any) -> Any:
        return _Tampering(self, await super().engine(address, item_type))


@frozen(eq=False)
class _Tampering(AsyncEngine[Any, Any]):
    _peers: TamperingPeers
    _next: AsyncEngine[Any, Any]

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        self._peers.calls += 1
        stream = await self._next.generate(request)
        return ResponseStream(self._changed(stream), request, stream)

    async def _changed(self, stream: ResponseStream[KvPiece]) -> AsyncGenerator[KvPiece, None]:
        async for piece in stream:
            if (frame := self._peers.tamper(piece.frame)) is None:
                await anyio.sleep_forever()
            else:
                yield evolve(piece, frame=frame)


@define
class World:
    """A prefill and a decode worker."""

    prefill: PeerHandover
    decode: PeerHandover
    prefill_peers: WorkerPeers
    peers: TamperingPeers
    """Those of the decode worker."""
    prefill_cache: Cache
    decode_cache: Cache
    tasks: TaskGroup

    def request(self, params: Any, token_ids: Sequence[int] = PROMPT) -> PreprocessedRequest:
        return PreprocessedRequest(list(token_ids), prefill_result=PrefillResult(params))

    async def take(self, params: Any, **others: Any) -> KvBytes | None:
        return await self.decode.take(self.request(params, **others))

    def offer(self) -> dict[str, Any]:
        return self.prefill.offer(PreprocessedRequest(list(PROMPT)), HELD)


@asynccontextmanager
async def world(cache: Cache | None = None, times: HandoverTimes = TIMES) -> AsyncIterator[World]:
    """Both workers started; the prefill worker's leases run."""
    prefill, decode = PeerHandover(prefills=True, times=times), PeerHandover(prefills=False, times=times)
    async with Runtime.in_process(rng=Random(1)) as runtime, anyio.create_task_group() as tasks:
        serves = WorkerPeers(runtime, EndpointId("ns", "prefill", "generate"), 1)
        calls = TamperingPeers(runtime, EndpointId("ns", "decode", "generate"), 2)
        both = World(prefill, decode, serves, calls, cache or Cache(), Cache(), tasks)
        await prefill.start(both.prefill_cache, serves)
        await decode.start(both.decode_cache, calls)
        tasks.start_soon(prefill.background)
        await anyio.wait_all_tasks_blocked()
        try:
            yield both
        finally:
            await prefill.close()
            await decode.close()
            await calls.withdraw()
