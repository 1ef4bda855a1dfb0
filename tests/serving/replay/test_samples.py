"""Samples of requests and workers, and the report made of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.replay import Limits, Report, Samples, make_report
from serving.replay.report import Balance
from serving.replay.samples import RequestSample, Status


def request(
    samples: Samples, *token_times: float, arrival: float = 0.0, end: float | None = None, **fields: Any
) -> RequestSample:
    """Record a request with tokens at these times; it ends at `end`, default with the last one.

    `fields` are `status`, `name`, `input_tokens`, `workers`, or fields of its sample.
    """
    status = fields.pop("status", Status.COMPLETED)
    sample = samples.arrived(fields.pop("name", "r"), arrival, input_tokens=fields.pop("input_tokens", 100))
    for worker in fields.pop("workers", ()):
        sample.routed(worker, arrival)
    for at in token_times:
        sample.tokens(at)
    for name, value in fields.items():
        setattr(sample, name, value)
    samples.ended(sample, (token_times or (arrival,))[-1] if end is None else end, status)
    return sample


def test_latencies_count_from_the_arrival_and_between_tokens() -> None:
    samples = Samples()
    request(samples, 30, 31, 33, 130, arrival=20)
    report = make_report(samples)
    assert (report.ttft.mean, report.ttst.mean, report.e2e_latency.mean) == (10, 1, 110)
    assert report.tpot.mean == pytest.approx(100 / 3)
    assert (report.itl.samples, report.itl.median, report.itl.max) == (3, 2, 97)
    assert report.output_token_throughput_per_user.max == 1000
    assert report.output_token_throughput_per_user.min == 1000 / 97


def test_tokens_of_one_item_come_at_one_time() -> None:
    samples = Samples()
    sample = samples.arrived("r", 0, input_tokens=1)
    sample.tokens(5, 3)
    sample.tokens(9, 0)
    sample.tokens(9)
    samples.ended(sample, 9)
    report = make_report(samples)
    assert (report.total_output_tokens, report.itl.samples, report.itl.max) == (4, 3, 4)
    assert report.output_token_throughput_per_user.samples == 1


def test_a_request_without_tokens_lasts_but_has_no_latency() -> None:
    samples = Samples()
    request(samples, end=70)
    report = make_report(samples)
    assert (report.completed_requests, report.duration_ms) == (1, 70)
    assert report.ttft.samples == report.e2e_latency.samples == report.tpot.samples == 0


def test_only_completed_requests_count_in_latencies_and_tokens() -> None:
    samples = Samples()
    request(samples, 10, 11, cached_tokens=25)
    request(samples, 5, 500, status=Status.FAILED, end=600)
    request(samples, status=Status.REJECTED)
    request(samples, 1, status=Status.CANCELLED)
    samples.arrived("open", 3, input_tokens=9).tokens(4)
    report = make_report(samples, unsent_requests=4, skipped_lines=5)
    assert (report.num_requests, report.completed_requests, report.rejected_requests) == (5, 1, 1)
    assert (report.failed_requests, report.cancelled_requests, report.unfinished_requests) == (1, 1, 1)
    assert (report.unsent_requests, report.skipped_lines) == (4, 5)
    assert (report.total_input_tokens, report.total_output_tokens, report.processed_tokens) == (100, 2, 102)
    assert (report.ttft.samples, report.itl.samples, report.prefix_cache_reused_ratio) == (1, 1, 0.25)
    assert report.duration_ms == 600
    assert report.request_throughput_rps == pytest.approx(1 / 0.6)


def test_rates_are_a_second_of_the_replay() -> None:
    samples = Samples()
    for _ in range(4):
        request(samples, 500, 2000, input_tokens=10)
    report = make_report(samples)
    assert (report.request_throughput_rps, report.input_throughput_tok_s) == (2, 20)
    assert (report.output_throughput_tok_s, report.total_throughput_tok_s) == (4, 24)


def test_reuse_at_first_and_at_last_are_two_figures() -> None:
    samples = Samples()
    request(samples, 1, cached_tokens=50, first_cached_tokens=10)
    request(samples, 1, cached_tokens=30)
    report = make_report(samples)
    assert (report.prefix_cache_reused_ratio, report.first_admission_prefix_cache_reused_ratio) == (0.4, 0.2)


def test_workers_cost_the_time_they_are_there() -> None:
    samples = Samples()
    samples.worker_joined(0, 0)
    samples.worker_joined(1, 0)
    request(samples, 2000)
    report = make_report(samples, gpus_per_worker=2)
    assert report.worker_seconds == 4.0
    assert round(report.gpu_hours, 6) == 0.002222


def test_a_worker_that_was_gone_costs_nothing_meanwhile() -> None:
    samples = Samples()
    samples.worker_joined(0, 0)
    samples.worker_left(0, 200)
    samples.worker_left(0, 300)
    samples.worker_joined(0, 700)
    samples.worker_joined(0, 800)
    samples.worker_joined(0, 0, "prefill")
    samples.worker_left(0, 5000, "prefill")
    samples.worker_left(9, 0)
    request(samples, 1000)
    report = make_report(samples, gpus_per_worker=1, gpus_per_prefill_worker=3)
    assert report.decode_worker_seconds == pytest.approx(0.5)
    assert report.prefill_worker_seconds == pytest.approx(1.0)
    assert report.gpu_hours == pytest.approx(3.5 / 3600)
    with pytest.raises(InvalidArgument):
        make_report(samples, gpus_per_worker=-1)


def test_each_worker_has_its_share() -> None:
    samples = Samples()
    for worker in (0, 1, 2):
        samples.worker_joined(worker, 0)
    request(samples, 50, 100, workers=[0], cached_tokens=40)
    request(samples, 50, 100, workers=[0])
    request(samples, 100, workers=[2, 1], migrations=1)
    request(samples, 100, workers=[1], status=Status.FAILED)
    samples.preempted(1, 3)
    report = make_report(samples)
    zero, one, two = report.workers
    assert (zero.requests, zero.input_tokens, zero.cached_tokens, zero.output_tokens) == (2, 200, 40, 4)
    assert (zero.hit_rate, zero.mean_running) == (0.2, 2.0)
    assert (one.requests, one.preemptions, one.mean_running) == (1, 3, 2.0)
    assert (two.requests, two.hit_rate, two.mean_running) == (0, None, 0.0)
    assert (report.migrations, report.migrated_requests, report.preemptions) == (1, 1, 3)
    assert report.request_balance.max_over_mean == 2.0
    assert report.load_balance.max_over_mean == 1.5


def test_a_prompt_counts_where_it_was_prefilled() -> None:
    samples = Samples()
    sample = samples.arrived("r", 0, input_tokens=100)
    sample.routed(0, 5, "prefill")
    sample.routed(7, 25)
    sample.cached_tokens = 10
    sample.tokens(125)
    samples.ended(sample, 125)
    decode, prefill = make_report(samples).workers
    assert (decode.worker, decode.role, decode.input_tokens, decode.output_tokens) == (7, "decode", 0, 1)
    assert (prefill.worker, prefill.role, prefill.input_tokens, prefill.requests) == (0, "prefill", 100, 1)
    assert (prefill.mean_running, decode.mean_running) == (20 / 125, 100 / 125)
    assert make_report(samples).queue_wait.mean == 5


def test_workers_that_share_evenly_are_in_balance() -> None:
    assert Balance.of([2.0, 2.0]) == Balance(1.0, 0.0)
    assert Balance.of([0.0, 4.0]) == Balance(2.0, 1.0)
    assert Balance.of([]) == Balance.of([0.0]) == Balance()


def test_phases_are_those_that_the_workers_report() -> None:
    samples = Samples()
    request(samples, 1, prefill_wait_ms=4.0, prefill_time_ms=8.0, kv_transfer_ms=2.0, queue_depth=7)
    request(samples, 1, prefill_wait_ms=6.0)
    report = make_report(samples)
    assert (report.prefill_wait.mean, report.prefill_time.samples, report.kv_transfer.mean) == (5, 1, 2)
    assert report.max_router_queue_depth == 7


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(ttft_ms=10), 1),
        (Limits(ttft_ms=9.9), 0),
        (Limits(e2e_ms=30), 2),
        (Limits(e2e_ms=29), 1),
        (Limits(itl_ms=10), 1),
        (Limits(itl_ms=9.9), 0),
        (Limits(ttft_ms=10, itl_ms=9.9), 0),
    ],
)
def test_good_requests_keep_every_limit(limits: Limits, good: int) -> None:
    """One has tokens at 10, 20 and 30, the other one has none and took 29."""
    samples = Samples()
    request(samples, 10, 20, 30)
    request(samples, end=29)
    goodput = make_report(samples, limits=limits).goodput
    assert goodput is not None
    assert goodput.completed_requests == good
    assert goodput.output_throughput_tok_s == pytest.approx(
        100 if limits in (Limits(ttft_ms=10), Limits(e2e_ms=30), Limits(itl_ms=10)) else 0
    )


def test_a_single_token_has_no_gap_to_be_judged_by() -> None:
    samples = Samples()
    request(samples, 10)
    goodput = make_report(samples, limits=Limits(itl_ms=0.1)).goodput
    assert goodput is not None
    assert goodput.completed_requests == 1


def test_there_is_no_goodput_without_limits() -> None:
    assert make_report(Samples()).goodput is None
    assert make_report(Samples(), limits=Limits()).goodput is None


def test_each_request_is_reported_on_request() -> None:
    samples = Samples()
    request(
        samples,
        30,
        40,
        arrival=20,
        workers=[3],
        name="s:1",
        session_id="s",
        turn_index=1,
        cached_tokens=64,
        prefill_wait_ms=5.0,
        prefill_time_ms=7.0,
    )
    assert make_report(samples).per_request is None
    (one,) = make_report(samples, per_request=True).per_request or []
    assert (one.name, one.session_id, one.turn_index, one.status) == ("s:1", "s", 1, Status.COMPLETED)
    assert (one.arrival_time_ms, one.first_token_ms, one.terminal_time_ms, one.worker) == (20, 30, 40, 3)
    assert (one.ttft_ms, one.ttst_ms, one.tpot_ms, one.e2e_latency_ms) == (10, 10, 10, 20)
    assert (one.queue_wait_ms, one.prefill_wait_ms, one.prefill_time_ms, one.kv_transfer_ms) == (0, 5, 7, None)
    assert (one.input_length, one.output_length, one.reused_input_tokens) == (100, 2, 64)


def test_of_an_empty_replay_all_is_0() -> None:
    report = make_report(Samples())
    assert (report.num_requests, report.duration_ms, report.request_throughput_rps) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.lists(st.floats(0, 50), max_size=5)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_the_order_in_which_requests_end_leaves_no_mark(requests: list[tuple[float, list[float]]], rng: Any) -> None:
    def report(order: list[int]) -> Report:
        samples = Samples()
        known = [samples.arrived(str(at), arrival, input_tokens=5) for at, (arrival, _) in enumerate(requests)]
        for at in order:
            now, (_, gaps) = requests[at][0], requests[at]
            for gap in gaps:
                now += gap
                known[at].tokens(now)
            samples.ended(known[at], now)
        return make_report(samples, per_request=True)

    in_order = list(range(len(requests)))
    mixed = list(in_order)
    rng.shuffle(mixed)
    assert report(mixed).to_json() == report(in_order).to_json()


def test_a_request_ends_once() -> None:
    samples = Samples()
    sample = request(samples, 1, 2)
    with pytest.raises(InvalidArgument, match="'r' is over already"):
        samples.ended(sample, 3)
    assert sample.output_tokens == 2


def test_a_worker_chosen_on_arrival_was_not_waited_for_however_the_clock_adds_up() -> None:
    samples = Samples()
    sample = samples.arrived("a", 600.0, input_tokens=1)
    sample.routed(0, 600.0 - 1e-10)
    assert sample.queue_wait_ms == 0.0
    late = samples.arrived("b", 600.0, input_tokens=1)
    late.routed(0, 600.25)
    assert late.queue_wait_ms == 0.25
