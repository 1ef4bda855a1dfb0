"""A cache handed over as bytes: leases, checks, faults on the way. In virtual time, over connections in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import attrs
import pytest
from anyio.abc import ByteStream, TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from attrs import define, evolve, field, frozen

from engines.torch.handover import HandoverTimes, OfferedKv, SocketHandover
from engines.torch.kv_wire import PIECE_BYTES
from engines.torch.slots import HeldBlocks, KvBytes
from pipeline import InvalidArgument
from pipeline.protocols import PrefillResult, PreprocessedRequest, RoutingHints

T = TypeVar("T")
PROMPT = (3, 1, 4, 1, 5, 9)
TIMES = HandoverTimes()
HELD = HeldBlocks((7, 8), PROMPT)
Tamper = Callable[[bytes], bytes]


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

    @property
    def store(self) -> Cache:
        return self

    def read(self, block_ids: Sequence[int], tokens: int) -> bytes:
        return bytes(block_ids[token % len(block_ids)] for token in range(tokens * self.layout.bytes_per_token))

    async def compute(self, work: Callable[[], T]) -> T:
        await anyio.sleep(self.read_s)
        return work()

    def release(self, held: HeldBlocks) -> None:
        self.released.append(held)


@define
class MemoryBytes(ByteStream):
    """One end of a connection in memory; what it sends goes through `tamper`."""

    _outgoing: MemoryObjectSendStream[bytes]
    _incoming: MemoryObjectReceiveStream[bytes]
    tamper: Tamper = lambda data: data

    async def send(self, item: bytes) -> None:
        if tampered := self.tamper(item):
            await self._outgoing.send(tampered)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._incoming.receive()

    async def send_eof(self) -> None:
        self._outgoing.close()

    async def aclose(self) -> None:
        self._outgoing.close()
        self._incoming.close()


@define
class World:
    """A prefill and a decode worker; `connections` counts what decode has opened."""

    prefill: SocketHandover
    decode: SocketHandover
    prefill_cache: Cache
    decode_cache: Cache
    tasks: TaskGroup
    tamper: Tamper = lambda data: data
    connections: int = 0

    async def connect(self, host: str, port: int) -> ByteStream:
        self.connections += 1
        there, back = (anyio.create_memory_object_stream[bytes](64) for _ in range(2))
        self.tasks.start_soon(self.prefill.serve_connection, MemoryBytes(back[0], there[1], self.tamper))
        return MemoryBytes(there[0], back[1])

    def request(self, params: Any, token_ids: Sequence[int] = PROMPT) -> PreprocessedRequest:
        return PreprocessedRequest(list(token_ids), prefill_result=PrefillResult(params))

    async def take(self, params: Any, **others: Any) -> KvBytes | None:
        return await self.decode.take(self.request(params, **others))

    def offer(self) -> dict[str, Any]:
        return self.prefill.offer(PreprocessedRequest(list(PROMPT)), HELD)


@asynccontextmanager
async def world(cache: Cache | None = None, times: HandoverTimes = TIMES) -> AsyncIterator[World]:
    """Both workers started; the prefill worker's leases run."""
    made: list[World] = []

    async def connect(host: str, port: int) -> ByteStream:
        return await made[0].connect(host, port)

    prefill = SocketHandover(prefills=True, times=times)
    decode = SocketHandover(prefills=False, times=times, connect=connect)
    async with anyio.create_task_group() as tasks:
        both = World(prefill, decode, cache or Cache(), Cache(), tasks)
        made.append(both)
        await prefill.start(both.prefill_cache)
        await decode.start(both.decode_cache)
        tasks.start_soon(prefill.background)
        await anyio.wait_all_tasks_blocked()
        try:
            yield both
        finally:
            await prefill.close()
            await decode.close()


async def test_decode_gets_the_bytes_and_the_blocks_are_free_at_once() -> None:
    async with world() as both:
        taken = await both.take(both.offer())
        await anyio.wait_all_tasks_blocked()
        assert taken == KvBytes(len(PROMPT), both.prefill_cache.read((7, 8), len(PROMPT)))
        assert both.prefill_cache.released == [HELD]
        assert len(both.prefill) == 0
        assert not both.decode.failures


async def test_a_cache_of_several_pieces_arrives_whole() -> None:
    wide = Layout(bytes_per_token=PIECE_BYTES)
    async with world(Cache(layout=wide)) as both:
        both.decode_cache.layout = wide
        taken = await both.take(both.offer())
        assert taken is not None
        assert taken.data == both.prefill_cache.read((7, 8), len(PROMPT))


async def test_what_no_worker_fetches_is_free_when_its_lease_is_over() -> None:
    async with world(times=HandoverTimes(lease_s=10)) as both:
        offered = both.offer()
        await anyio.sleep(9.9)
        assert both.prefill_cache.released == []
        await anyio.sleep(0.2)
        assert both.prefill_cache.released == [HELD]
        assert await both.take(offered) is None
        assert both.decode.failures == {"WorkerOverloaded": 1}


async def test_a_fetch_holds_the_blocks_beyond_the_lease() -> None:
    async with world(Cache(read_s=4), HandoverTimes(lease_s=10, stall_s=5)) as both:
        offered = both.offer()
        await anyio.sleep(9)
        both.tasks.start_soon(both.take, offered)
        await anyio.sleep(3)
        assert both.prefill_cache.released == []
        await anyio.sleep(2)
        assert both.prefill_cache.released == [HELD]


async def test_an_offer_is_fetched_once() -> None:
    async with world() as both:
        offered = both.offer()
        assert await both.take(offered) is not None
        await anyio.wait_all_tasks_blocked()
        assert await both.take(offered) is None
        assert both.prefill_cache.released == [HELD]


@pytest.mark.parametrize(
    "change",
    [{"model": "other"}, {"layout": {"layers": 3}}, {"tokens": 5}, {"tokens": 0}, {"tokens": 99}, {"prompt_hash": 1}],
)
async def test_a_cache_that_does_not_fit_is_not_fetched(change: dict[str, Any]) -> None:
    async with world() as both:
        params = both.offer()
        params["torch_kv"] |= change
        assert await both.take(params) is None
        assert both.decode.failures == {"misfit": 1}
        assert both.connections == 0


async def test_a_cache_of_another_adapter_is_not_fetched() -> None:
    async with world() as both:
        request = both.request(both.offer())
        request.routing = RoutingHints(lora_name="legal")
        assert await both.decode.take(request) is None
        assert both.decode.failures == {"misfit": 1}


async def test_a_migrated_request_uses_the_cache_for_its_beginning() -> None:
    async with world() as both:
        taken = await both.take(both.offer(), token_ids=[*PROMPT, 2, 6])
        assert taken is not None
        assert taken.tokens == len(PROMPT)


@pytest.mark.parametrize("params", [None, {}, {"kv_transfer_params": {}}, {"torch_kv": 3}, {"torch_kv": {"host": 1}}])
async def test_the_prefill_of_another_engine_is_refused_by_name(params: Any) -> None:
    async with world() as both:
        with pytest.raises(InvalidArgument) as refused:
            await both.take(params)
        assert refused.value.field.startswith("prefill_result.disaggregated_params")


def flipped(data: bytes) -> bytes:
    return data if len(data) < 300 else data[:-1] + bytes([data[-1] ^ 1])


def cut(data: bytes) -> bytes:
    return data if len(data) < 300 else data[:100]


def lost(data: bytes) -> bytes:
    return data if len(data) < 300 else b""


@pytest.mark.parametrize(
    ("tamper", "kind"), [(flipped, "ChecksumMismatch"), (cut, "TimeoutError"), (lost, "TimeoutError")]
)
async def test_damaged_bytes_are_computed_again_and_wait_for_the_lease(tamper: Tamper, kind: str) -> None:
    async with world() as both:
        both.tamper = tamper
        offered = both.offer()
        assert await both.take(offered) is None
        assert both.decode.failures == {kind: 1}
        await anyio.wait_all_tasks_blocked()
        assert both.prefill_cache.released == []
        both.tamper = lambda data: data
        assert await both.take(offered) is not None  # another worker may still fetch it


async def test_a_prefill_worker_that_is_gone_costs_the_time_of_a_connection_only() -> None:
    async with world() as both:

        async def refused(host: str, port: int) -> ByteStream:
            raise ConnectionRefusedError(111, "Connection refused")

        decode = SocketHandover(prefills=False, connect=refused)
        await decode.start(both.decode_cache)
        assert await decode.take(both.request(both.offer())) is None
        assert decode.failures == {"ConnectionRefusedError": 1}


async def test_a_take_that_is_cancelled_leaves_the_offer_to_its_lease() -> None:
    async with world(Cache(read_s=4)) as both:
        with anyio.move_on_after(1):
            await both.take(both.offer())
        assert not both.decode.failures
        await anyio.sleep(31)
        assert both.prefill_cache.released == [HELD]


async def test_a_connection_that_sends_nothing_or_nonsense_harms_no_other() -> None:
    async with world() as both:
        silent = await both.connect("", 0)
        noisy = await both.connect("", 0)
        await noisy.send(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
        assert await both.take(both.offer()) is not None
        await anyio.sleep(6)  # longer than a stall
        for stream in (silent, noisy):
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            await stream.aclose()


async def test_a_cache_that_cannot_be_read_costs_one_fetch_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(block_ids: Sequence[int], tokens: int) -> bytes:
        raise RuntimeError("the device is lost")

    async with world() as both:
        whole = both.prefill_cache.read
        both.prefill_cache.read = fail  # type: ignore[method-assign]
        offered = both.offer()
        assert await both.take(offered) is None
        assert both.decode.failures == {"InvalidMessage": 1}
        assert "the device is lost" in caplog.text
        both.prefill_cache.read = whole  # type: ignore[method-assign]
        assert await both.take(offered) is not None


async def test_a_close_releases_every_offer_once_and_cuts_fetches() -> None:
    async with world(Cache(read_s=4)) as both:
        offered = both.offer()
        both.offer()
        both.tasks.start_soon(both.take, offered)
        await anyio.sleep(1)
        await both.prefill.close()
        await both.prefill.close()
        await anyio.sleep(10)
        assert both.prefill_cache.released == [HELD, HELD]


def test_the_params_are_plain_values() -> None:
    offered = OfferedKv("127.0.0.1", 1, "id", "tiny", {"layers": 2}, 3, 2**64 - 1)
    assert OfferedKv.of_params({"torch_kv": {**_plain(offered), "added_later": 1}}) == offered
    assert "another prompt" in (evolve(offered, tokens=0).misfit("tiny", {"layers": 2}, PreprocessedRequest([1])) or "")


def _plain(offered: OfferedKv) -> dict[str, Any]:
    return attrs.asdict(offered)


class TestRealSockets:
    """The same over TCP, in real time."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    async def test_a_cache_crosses_a_socket(self) -> None:
        prefill, decode = SocketHandover(prefills=True), SocketHandover(prefills=False)
        owner, other = Cache(), Cache()
        await prefill.start(owner)
        await decode.start(other)
        params = prefill.offer(PreprocessedRequest(list(PROMPT)), HELD)
        request = PreprocessedRequest(list(PROMPT), prefill_result=PrefillResult(params))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prefill.background)
            taken = await decode.take(request)
            assert taken == KvBytes(len(PROMPT), owner.read((7, 8), len(PROMPT)))
            await prefill.close()
        assert owner.released == [HELD]
        assert await decode.take(request) is None
