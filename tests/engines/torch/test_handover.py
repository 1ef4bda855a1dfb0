"""A cache handed over as bytes: leases, checks, faults on the way. In virtual time, over a request plane in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import attrs
import pytest
from attrs import evolve

from engines.torch import HandoverTimes, KvBytes, PeerHandover
from engines.torch.handover import OfferedKv
from engines.torch.kv_wire import PIECE_BYTES, KvCall, KvPiece
from pipeline import Context, InvalidArgument
from pipeline.protocols import PreprocessedRequest, RoutingHints

from .handover_worlds import HELD, PROMPT, Cache, Layout, Tamper, untouched, world


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


async def test_eight_caches_are_in_memory_at_the_same_time_and_the_others_wait() -> None:
    async with world(Cache(read_s=1)) as both:
        taken = list[KvBytes | None]()

        async def take(params: Any) -> None:
            taken.append(await both.take(params))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(take, both.offer())
        assert both.prefill_cache.most_reading == 8
        assert len(taken) == 20
        assert None not in taken
        await anyio.wait_all_tasks_blocked()
        assert both.prefill_cache.released == [HELD] * 20


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
        assert both.peers.calls == 0


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


@pytest.mark.parametrize(
    "params", [None, {}, {"kv_transfer_params": {}}, {"torch_kv": 3}, {"torch_kv": {"address": 1}}]
)
async def test_the_prefill_of_another_engine_is_refused_by_name(params: Any) -> None:
    async with world() as both:
        with pytest.raises(InvalidArgument) as refused:
            await both.take(params)
        assert refused.value.field.startswith("prefill_result.disaggregated_params")


def flipped(frame: bytes) -> bytes:
    return frame[:-1] + bytes([frame[-1] ^ 1])


def cut(frame: bytes) -> bytes:
    return frame[:100]


def lost(frame: bytes) -> None:
    return None


@pytest.mark.parametrize(
    ("tamper", "kind"), [(flipped, "ChecksumMismatch"), (cut, "InvalidMessage"), (lost, "TimeoutError")]
)
async def test_damaged_bytes_are_computed_again_and_wait_for_the_lease(tamper: Tamper, kind: str) -> None:
    async with world() as both:
        both.peers.tamper = tamper
        offered = both.offer()
        assert await both.take(offered) is None
        assert both.decode.failures == {kind: 1}
        await anyio.wait_all_tasks_blocked()
        assert both.prefill_cache.released == []
        both.peers.tamper = untouched
        assert await both.take(offered) is not None  # another worker may still fetch it


async def test_a_cache_of_another_size_is_not_taken() -> None:
    async with world(Cache(layout=Layout(bytes_per_token=63))) as both:
        both.decode_cache.layout = evolve(both.decode_cache.layout, bytes_per_token=64)
        params = both.offer()
        params["torch_kv"]["layout"]["bytes_per_token"] = 64
        assert await both.take(params) is None
        assert both.decode.failures == {"InvalidMessage": 1}


@pytest.mark.parametrize("how", ["withdraw", "cut", "abort"])
async def test_a_prefill_worker_that_is_gone_costs_the_time_of_a_lookup_only(how: str) -> None:
    async with world() as both:
        params, begun_s = both.offer(), anyio.current_time()
        if how == "withdraw":
            await both.prefill_peers.withdraw()
        else:
            getattr(both.prefill_peers, how)()
        assert await both.take(params) is None
        assert both.decode.failures == {"CannotConnect": 1}
        assert anyio.current_time() - begun_s <= 1.01


async def test_a_prefill_worker_that_dies_while_it_sends_costs_a_computation() -> None:
    async with world(Cache(read_s=4)) as both:
        both.tasks.start_soon(both.take, both.offer())
        await anyio.sleep(1)
        both.prefill_peers.abort()
        await anyio.sleep(0.1)
        assert both.decode.failures == {"Disconnected": 1}


async def test_a_prefill_worker_that_dies_before_it_knows_that_all_has_come_costs_nothing() -> None:
    async with world() as both:

        def die(frame: bytes) -> bytes:
            both.tasks.start_soon(kill)
            return frame

        async def kill() -> None:
            both.prefill_peers.cut()

        both.peers.tamper = die
        assert await both.take(both.offer()) is not None
        assert not both.decode.failures


async def test_workers_without_peers_compute_each_prompt_again() -> None:
    async with world() as both:
        alone = PeerHandover(prefills=True)
        await alone.start(both.prefill_cache, None)
        params = alone.offer(PreprocessedRequest(list(PROMPT)), HELD)
        assert both.prefill_cache.released == [HELD]
        assert await both.take(params) is None
        assert both.decode.failures == {"misfit": 1}
        other = PeerHandover(prefills=False)
        await other.start(both.decode_cache, None)
        assert await other.take(both.request(both.offer())) is None
        assert other.failures == {"misfit": 1}


async def test_a_take_that_is_cancelled_leaves_the_offer_to_its_lease() -> None:
    async with world(Cache(read_s=4)) as both:
        with anyio.move_on_after(1):
            await both.take(both.offer())
        assert not both.decode.failures
        await anyio.sleep(31)
        assert both.prefill_cache.released == [HELD]


async def test_a_fetch_that_breaks_off_leaves_the_offer_to_its_own_lease() -> None:
    async with world(Cache(read_s=4)) as both:
        first = both.offer()
        with anyio.move_on_after(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(both.take, first)
                await anyio.sleep(1)
                both.offer()
        await anyio.sleep(28.5)  # 30.5 s after the first offer, 29.5 s after the second
        assert both.prefill_cache.released == [HELD]
        await anyio.sleep(1)
        assert both.prefill_cache.released == [HELD, HELD]


async def test_a_caller_that_reads_no_more_holds_neither_the_blocks_nor_a_place_for_longer_than_a_stall() -> None:
    wide = Layout(bytes_per_token=PIECE_BYTES)
    async with world(Cache(layout=wide), HandoverTimes(lease_s=3, stall_s=5)) as both:
        both.decode_cache.layout = wide
        streams = []
        for _ in range(8):
            params = both.offer()["torch_kv"]
            peer = await both.peers.engine(params["address"], KvPiece)
            streams.append(await peer.generate(Context(KvCall(params["transfer_id"]))))
            await anext(streams[-1])
        await anyio.sleep(4.9)
        assert both.prefill_cache.released == []
        await anyio.sleep(0.2)
        assert both.prefill_cache.released == [HELD] * 8
        assert await both.take(both.offer()) is not None
        for stream in streams:
            assert await stream.collect() == []
            await stream.aclose()


async def test_a_cache_that_cannot_be_read_costs_one_fetch_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(block_ids: Sequence[int], tokens: int) -> bytes:
        raise RuntimeError("the device is lost")

    async with world() as both:
        whole = both.prefill_cache.read
        both.prefill_cache.read = fail  # type: ignore[method-assign]
        offered = both.offer()
        assert await both.take(offered) is None
        assert both.decode.failures == {"Unknown": 1}
        assert "the device is lost" in caplog.text
        both.prefill_cache.read = whole  # type: ignore[method-assign]
        assert await both.take(offered) is not None


async def test_a_prefill_worker_that_ends_in_order_waits_for_its_offers_to_be_taken() -> None:
    async with world(Cache(read_s=2)) as both:
        both.tasks.start_soon(both.take, both.offer())
        begun_s = anyio.current_time()
        await both.prefill.drain()
        assert anyio.current_time() - begun_s == pytest.approx(2, abs=0.1)
        assert both.prefill_cache.released == [HELD]
        await both.prefill.drain()
        assert anyio.current_time() - begun_s == pytest.approx(2, abs=0.1)


async def test_a_prefill_worker_that_ends_in_order_does_not_wait_for_a_whole_lease() -> None:
    async with world() as both:
        both.offer()
        begun_s = anyio.current_time()
        await both.prefill.drain()
        await both.decode.drain()
        assert anyio.current_time() - begun_s == pytest.approx(both.prefill.times.stall_s)


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
    offered = OfferedKv("ns/prefill/peers/1/0", "id", "tiny", {"layers": 2}, 3, 2**64 - 1)
    assert OfferedKv.of_params({"torch_kv": {**_plain(offered), "added_later": 1}}) == offered
    assert "another prompt" in (evolve(offered, tokens=0).misfit("tiny", {"layers": 2}, PreprocessedRequest([1])) or "")


def _plain(offered: OfferedKv) -> dict[str, Any]:
    return attrs.asdict(offered)
