"""The request tracker: first writes hold, durations follow, one phase at a time."""

from __future__ import annotations

from itertools import accumulate

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from pipeline import Context
from pipeline.llm import TRACKER, track_request, tracker_of
from pipeline.protocols import RequestPhase, RequestTracker, RoutingData, worker_gauges
from pipeline.protocols.timing import TimingInfo, WorkerIdInfo
from pipeline.wire import to_plain


@define
class Clock:
    """A clock whose time, in seconds, is set by the test."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def tracker_at(clock: Clock) -> RequestTracker:
    return RequestTracker(clock, lambda: 1_700_000_000_000, lambda: anyio.Semaphore(1))


def test_token_counts_are_kept() -> None:
    tracker = tracker_at(Clock())
    tracker.record_isl(512, 256)
    tracker.record_osl(100)
    assert (tracker.isl_tokens, tracker.cached_tokens, tracker.osl_tokens) == (512, 256, 100)


def test_cached_tokens_are_recorded_only_if_given_and_the_first_holds() -> None:
    tracker = tracker_at(Clock())
    tracker.record_isl(512)
    assert [tracker.cached_tokens] == [None]
    tracker.record_isl(1, 7)
    tracker.record_isl(2, 8)
    assert (tracker.isl_tokens, tracker.cached_tokens) == (512, 7)


def test_time_to_first_token_needs_a_first_token() -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    assert tracker.ttft_ms is None
    clock.now += 0.010
    tracker.record_first_token()
    assert tracker.ttft_ms == pytest.approx(10)


@pytest.mark.parametrize("name", ["prefill_start", "first_token", "decode_first_token", "prefill_complete"])
def test_a_point_in_time_is_recorded_once(name: str) -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    record = getattr(tracker, f"record_{name}")
    assert record() is True
    clock.now += 5
    assert record() is False
    assert getattr(tracker, name) == 100.0


def test_the_last_finish_and_output_length_hold() -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    tracker.record_finish()
    tracker.record_osl(1)
    clock.now += 2
    tracker.record_finish()
    tracker.record_osl(5)
    assert tracker.total_time_ms == pytest.approx(2000)
    assert tracker.osl_tokens == 5


def test_decode_first_token_is_independent_of_first_token() -> None:
    tracker = tracker_at(Clock())
    tracker.record_decode_first_token()
    assert tracker.first_token is None


@pytest.mark.parametrize(("osl", "itl_ms"), [(0, None), (1, None), (2, 1000.0), (11, 100.0)])
def test_time_between_tokens_needs_two_tokens(osl: int, itl_ms: float | None) -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    tracker.record_first_token()
    clock.now += 1
    tracker.record_finish()
    tracker.record_osl(osl)
    assert tracker.avg_itl_ms == (None if itl_ms is None else pytest.approx(itl_ms))


def test_time_between_tokens_needs_both_times() -> None:
    tracker = tracker_at(Clock())
    tracker.record_osl(5)
    tracker.record_finish()
    assert tracker.avg_itl_ms is None


def test_prefill_times() -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    assert (tracker.prefill_wait_time_ms, tracker.prefill_time_ms) == (None, None)
    clock.now += 1
    tracker.record_prefill_start()
    assert tracker.prefill_time_ms is None
    clock.now += 2
    tracker.record_first_token()
    assert tracker.prefill_wait_time_ms == pytest.approx(1000)
    assert tracker.prefill_time_ms == pytest.approx(2000)


@pytest.mark.parametrize(("overlap", "blocks", "rate"), [(3.0, 10, 0.3), (0.0, 0, None), (0.0, 4, 0.0)])
def test_the_hit_rate_is_overlap_over_blocks(overlap: float, blocks: int, rate: float | None) -> None:
    tracker = tracker_at(Clock())
    assert tracker.kv_hit_rate is None
    tracker.record_kv_hit(overlap, blocks)
    tracker.record_kv_hit(9.0, 9)
    assert tracker.kv_hit_rate == rate


def test_the_first_queue_depth_holds() -> None:
    tracker = tracker_at(Clock())
    tracker.record_router_queue_depth(42)
    tracker.record_router_queue_depth(99)
    assert tracker.router_queue_depth == 42


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (RequestPhase.PREFILL, WorkerIdInfo(7, 1)),
        (RequestPhase.DECODE, WorkerIdInfo(None, None, 7, 1)),
        (RequestPhase.AGGREGATED, WorkerIdInfo(7, 1, 7, 1)),
    ],
)
def test_a_worker_is_recorded_for_its_phase(phase: RequestPhase, expected: WorkerIdInfo) -> None:
    tracker = tracker_at(Clock())
    assert tracker.worker_info() is None
    tracker.phase = phase
    tracker.record_worker(7, 1)
    assert tracker.worker_info() == expected


def test_the_first_worker_holds_and_its_rank_may_come_later(caplog: pytest.LogCaptureFixture) -> None:
    tracker = tracker_at(Clock())
    tracker.record_worker(0)
    tracker.record_worker(0, 0, "decode")
    assert caplog.records == []
    tracker.record_worker(8, 3, "prefill")
    tracker.record_worker(0, 5)
    assert tracker.worker_info() == WorkerIdInfo(0, 0, 0, 0)
    assert tracker.decode_worker.worker_type == "decode"
    assert len(caplog.records) == 4
    tracker.record_worker(0, 0, "prefill")
    assert tracker.decode_worker.worker_type == "decode"
    assert len(caplog.records) == 6


def test_another_routers_workers_fill_gaps_only() -> None:
    external = WorkerIdInfo(1, 2, 3, 4)
    tracker = tracker_at(Clock())
    tracker.record_external_workers(external)
    tracker.record_external_workers(WorkerIdInfo(9, 9, 9, 9))
    assert tracker.worker_info() == external
    tracker.record_worker(42, 0)
    assert tracker.worker_info() == WorkerIdInfo(42, 0, 42, 0)


def test_the_first_external_query_tokens_hold() -> None:
    tracker = tracker_at(Clock())
    tracker.record_external_query_token_ids([1])
    tracker.record_external_query_token_ids([2])
    assert tracker.routing_data().token_ids == [1]


def test_the_last_prefill_reports_what_was_cached_of_the_prompt() -> None:
    tracker = tracker_at(Clock())
    assert tracker.prefill_cached_tokens is None
    for reported, known in ((None, None), (64, 64), (None, 64), (0, 0)):
        tracker.record_prefill_cached(reported)
        assert tracker.prefill_cached_tokens == known


def test_the_transfer_time_needs_both_ends_and_is_not_negative() -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    tracker.record_decode_first_token()
    assert tracker.kv_transfer_estimated_latency_s is None
    assert "kv_transfer_estimated_latency_ms" not in to_plain(tracker.timing_info())
    clock.now += 1
    tracker.record_prefill_complete()
    assert tracker.kv_transfer_estimated_latency_s == 0.0

    late = tracker_at(clock)
    late.record_prefill_complete()
    assert late.kv_transfer_estimated_latency_s is None
    clock.now += 0.25
    late.record_decode_first_token()
    assert late.timing_info().kv_transfer_estimated_latency_ms == pytest.approx(250)


def test_timing_is_written_without_what_is_not_known() -> None:
    assert to_plain(tracker_at(Clock()).timing_info()) == {"request_received_ms": 1_700_000_000_000}


def test_external_timing_fills_gaps_but_never_the_time_of_receipt() -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    tracker.record_external_timing(TimingInfo(5, ttft_ms=77.0, kv_hit_rate=0.5))
    tracker.record_external_timing(TimingInfo(6, total_time_ms=1.0))
    assert tracker.timing_info() == TimingInfo(1_700_000_000_000, ttft_ms=77.0, kv_hit_rate=0.5)
    clock.now += 1
    tracker.record_first_token()
    assert tracker.timing_info().ttft_ms == pytest.approx(1000)
    assert tracker.routing_data() == RoutingData(tracker.timing_info(), None, None)


def test_text_work_is_measured() -> None:
    tracker = tracker_at(Clock())
    assert [tracker.detokenize_total_s] == [None]
    tracker.record_tokenize_latency(0.5)
    tracker.record_tokenize_latency(0.9)
    tracker.record_detokenize(1_000_000_000)
    tracker.record_detokenize(500_000_000)
    assert (tracker.tokenize_latency_s, tracker.detokenize_total_s, tracker.detokenize_count) == (0.5, 1.5, 2)
    tracker.record_detokenize(2**64)
    assert tracker.detokenize_total_s == (2**64 - 1) / 1e9


def test_worker_gauges_name_their_worker_and_rank() -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    clock.now += 0.5
    tracker.record_isl(64)
    tracker.record_first_token()
    clock.now += 1
    tracker.record_finish()
    tracker.record_osl(3)
    assert worker_gauges(tracker) == []
    tracker.phase = RequestPhase.PREFILL
    tracker.record_worker(7, 1, "prefill")
    tracker.phase = RequestPhase.DECODE
    tracker.record_worker(8)
    prefill = {"worker_id": "7", "dp_rank": "1", "worker_type": "prefill"}
    decode = {"worker_id": "8", "dp_rank": "none", "worker_type": "decode"}
    assert worker_gauges(tracker) == [
        ("worker_last_time_to_first_token_seconds", prefill, pytest.approx(0.5)),
        ("worker_last_input_sequence_tokens", prefill, 64.0),
        ("worker_last_inter_token_latency_seconds", decode, pytest.approx(0.5)),
    ]


def test_an_aggregated_worker_is_shown_as_one_that_decodes() -> None:
    tracker = tracker_at(Clock())
    tracker.record_isl(64)
    tracker.record_worker(7, 0, "aggregated")
    tracker.record_first_token()
    assert {labels["worker_type"] for _, labels, _ in worker_gauges(tracker)} == {"decode"}


def test_a_worker_that_was_only_chosen_sets_no_gauge() -> None:
    tracker = tracker_at(Clock())
    tracker.record_isl(64)
    tracker.record_worker(7, 0, "decode")
    assert worker_gauges(tracker) == []


def test_the_end_of_an_answer_is_its_whole_length() -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    tracker.record_first_token()
    tracker.begin_attempt(3)
    clock.now += 4
    tracker.record_answer(5)
    assert (tracker.osl_tokens, tracker.total_time_ms, tracker.avg_itl_ms) == (5, 4000, 1000)


@pytest.mark.parametrize("decoded", [False, True])
def test_the_prefill_of_an_attempt_without_a_token_is_forgotten(decoded: bool) -> None:
    clock = Clock()
    tracker = tracker_at(clock)
    tracker.record_prefill_complete()
    clock.now += 1
    if decoded:
        tracker.record_decode_first_token()
    tracker.begin_attempt(1 if decoded else 0)
    clock.now += 5
    tracker.record_prefill_complete()
    clock.now += 2
    tracker.record_decode_first_token()
    assert tracker.kv_transfer_estimated_latency_s == (1 if decoded else 2)


async def test_a_tracker_is_found_where_a_stage_left_it() -> None:
    request, tracker = Context("payload"), track_request(lambda: 0)
    assert tracker_of(request) is None
    request.registry.insert_shared(TRACKER, tracker)
    assert tracker_of(request.child("other")) is tracker


async def test_the_next_phase_waits_until_the_permit_is_released() -> None:
    tracker = track_request(lambda: 0)
    seen: list[RequestPhase] = []

    async def decode() -> None:
        with await tracker.set_phase(RequestPhase.DECODE):
            seen.append(tracker.phase)

    permit = await tracker.set_phase(RequestPhase.PREFILL)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(decode)
        for _ in range(5):
            await checkpoint()
        assert tracker.phase is RequestPhase.PREFILL
        assert seen == []
        permit.release()
        permit.release()
    assert seen == [RequestPhase.DECODE]
    (await tracker.set_phase(RequestPhase.AGGREGATED)).release()


async def test_a_permit_may_be_released_by_another_task_and_only_once() -> None:
    tracker = track_request(lambda: 0)
    permit = await tracker.set_phase(RequestPhase.PREFILL)
    async with anyio.create_task_group() as tasks:

        async def finish_prefill() -> None:
            permit.release()

        tasks.start_soon(finish_prefill)
    held = await tracker.set_phase(RequestPhase.DECODE)
    permit.release()
    with anyio.move_on_after(1) as waited:
        await tracker.set_phase(RequestPhase.AGGREGATED)
    assert waited.cancelled_caught
    assert tracker.phase is RequestPhase.DECODE
    held.release()
    (await tracker.set_phase(RequestPhase.AGGREGATED)).release()


async def test_a_tracker_runs_on_the_loops_own_clock() -> None:
    tracker = track_request(lambda: 1234)
    await anyio.sleep(2)
    tracker.record_first_token()
    assert tracker.ttft_ms == pytest.approx(2000, abs=1)
    assert tracker.received_ms == 1234


@given(uptime_s=st.floats(0, 1e9), steps_ms=st.lists(st.integers(0, 100_000), min_size=6, max_size=6))
def test_times_of_a_clock_of_milliseconds_are_whole_milliseconds(uptime_s: float, steps_ms: list[int]) -> None:
    """They were 48.99999999997817."""
    clock = Clock(begun := round(uptime_s, 3))
    tracker = tracker_at(clock)
    points = (
        *(tracker.record_prefill_start, tracker.record_prefill_complete, tracker.record_first_token),
        *(tracker.record_decode_first_token, tracker.record_finish),
    )
    for passed, record in zip(accumulate(steps_ms), points, strict=False):
        clock.now = round(begun + passed / 1000, 3)
        record()
    wait, prefill, _, decode, end = steps_ms[:5]
    timing = tracker.timing_info()
    assert timing.prefill_wait_time_ms == wait
    assert timing.prefill_time_ms == prefill + steps_ms[2]
    assert timing.ttft_ms == wait + prefill + steps_ms[2]
    assert timing.total_time_ms == sum(steps_ms[:5])
    assert timing.kv_transfer_estimated_latency_ms == steps_ms[2] + decode
    tracker.record_osl(2)
    tracker.record_worker(7)
    gauges = {name: value for name, _, value in worker_gauges(tracker)}
    assert gauges["worker_last_time_to_first_token_seconds"] == (wait + prefill + steps_ms[2]) / 1000
    assert gauges["worker_last_inter_token_latency_seconds"] == (decode + end) / 1000
