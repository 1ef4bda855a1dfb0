"""What workers report of their passes, and what a router makes of it."""

from __future__ import annotations

from math import exp, log
from random import Random
from typing import Any

import anyio
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import rate_reports
from operators.kv.decision import Prompt
from operators.kv.load import RankLoads
from operators.kv.marginal import marginal_delays
from operators.kv.pace import UNOBSERVED, Pace, PaceMeter
from operators.kv.rates import MOST_PS, MOST_SLOWNESS, USUAL, EngineCosts, ReportedRates, slowness
from operators.kv.types import WorkerRank
from pipeline import InvalidArgument
from pipeline.network import Scope
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.kv import KV_RATES_TOPIC, PassRates, RankRates
from pipeline.rx import Subject
from pipeline.wire import from_msgpack, record_reader, to_msgpack
from tests.pipeline.network.direct_events.worlds import deployment

from .worlds import GivenHealth, prompt, published, reserved, router_of

A, B, C, D = (WorkerRank(worker_id) for worker_id in (1, 2, 3, 4))
ENGINE = PassRates(64_000_000_000, 16_000_000, 25_600_000_000, 400_000)
"""A pass takes as long as 4,000 prompt tokens, a step as 1,600, a token in the cache a 40th: all far from the usual."""


def times(rates: PassRates, factor: float) -> PassRates:
    """An engine that takes so many times as long."""
    each = (rates.pass_ps, rates.prompt_token_ps, rates.step_ps, rates.held_token_ps)
    return PassRates(*(None if rate is None else round(factor * rate) for rate in each))


def relative(factors: dict[WorkerRank, float]) -> dict[WorkerRank, float]:
    return slowness({rank: times(ENGINE, factor) for rank, factor in factors.items()}, 1000.0)


# -- what is made of reports


def test_of_workers_that_differ_each_counts_by_what_it_reports() -> None:
    """By the square root of it."""
    found = relative({A: 1.0, B: 2.0, C: 1.0, D: 2.0})
    assert found[B] / found[A] == pytest.approx(2**0.5)
    assert (found[A], found[B]) == (found[C], found[D])
    assert found[A] * found[B] == pytest.approx(1)


def test_workers_that_are_nearly_alike_count_as_equal() -> None:
    assert set(relative({A: 1.0, B: 1.05, C: 0.97, D: 1.1}).values()) == {1.0}
    found = relative({A: 1.0, B: 1.05, C: 3.0, D: 3.1})
    assert found[A] == found[B] < 1 < found[C] == found[D]


def test_one_report_of_nonsense_leaves_the_others_as_they_are() -> None:
    found = relative({A: 1.0, B: 1.0, C: 1.0, D: 1e-6})
    assert {found[A], found[B], found[C]} == {1.0}
    assert found[D] == pytest.approx(exp(-MOST_SLOWNESS))


def test_ranks_that_compute_no_prompts_count_by_their_steps() -> None:
    fast, slow = PassRates(step_ps=10**9, held_token_ps=10), PassRates(step_ps=3 * 10**9)
    found = slowness({A: fast, B: slow}, 1000.0)
    assert found[B] / found[A] == pytest.approx(3**0.5)


@given(st.dictionaries(st.integers(0, 20), st.floats(1e-4, 1e4), max_size=20))
def test_who_takes_longer_counts_no_less_and_none_without_bounds(factors: dict[int, float]) -> None:
    engines = {WorkerRank(worker): factor for worker, factor in factors.items()}
    known = {rank: times(ENGINE, factor) for rank, factor in engines.items()}
    found = slowness(known, 500.0)
    assert found.keys() == known.keys()
    assert all(abs(log(slow)) < MOST_SLOWNESS + 1e-9 for slow in found.values())
    in_order = sorted(known, key=lambda rank: engines[rank])
    assert [found[rank] for rank in in_order] == sorted(found.values())
    if len(set(factors.values())) == 1:
        assert set(found.values()) == {1.0}


def costs_of(*rates: PassRates, cards: list[ModelRuntimeConfig] | None = None) -> EngineCosts:
    reports = ReportedRates()
    reports.set_limits(cards or [])
    for worker, each in enumerate(rates):
        reports.take_in(WorkerRank(worker), each, 0.0)
    return reports.costs(reports.known(1.0))


def test_what_a_pass_and_a_step_cost_is_of_the_engine_in_the_middle() -> None:
    found = costs_of(ENGINE, times(ENGINE, 3.0), evolve(ENGINE, pass_ps=10**13))
    assert found == EngineCosts(4000.0, USUAL.batch_tokens, 1 / 40, 1600.0)


def test_what_is_not_reported_has_its_default() -> None:
    assert costs_of() == USUAL
    assert costs_of(PassRates(), PassRates(step_ps=10**9, held_token_ps=1)) == USUAL
    found = costs_of(evolve(ENGINE, step_ps=None, held_token_ps=None))
    assert found == evolve(USUAL, pass_tokens=4000.0)


def test_a_cost_near_the_usual_one_is_the_usual_one() -> None:
    """A fit goes up and down with the prompts that come; what was tuned by the usual costs stays as it is."""
    for factor, is_usual in ((1.9, True), (1 / 1.9, True), (2.1, False), (1 / 2.1, False)):
        rates = PassRates(10**10, 10**7, round(384 * factor * 10**7), round(factor * 10**7 / 300))
        assert (costs_of(rates) == USUAL) is is_usual


def test_a_pass_that_seems_to_take_less_than_usual_takes_the_usual_time() -> None:
    assert costs_of(PassRates(0, 10**7)) == costs_of(PassRates(10**8, 10**7)) == USUAL
    assert costs_of(PassRates(10**11, 10**7)).pass_tokens == 10**4


@given(st.lists(st.builds(PassRates, *[st.none() | st.integers(0, 2**64 - 1)] * 4), max_size=6))
def test_whatever_is_reported_the_costs_stay_near_the_usual_ones(rates: list[PassRates]) -> None:
    found = costs_of(*rates)
    for own, usual in zip(
        (found.pass_tokens, found.step, found.step_tokens),
        (USUAL.pass_tokens, USUAL.step, USUAL.step_tokens),
        strict=True,
    ):
        assert usual / 17 < own < usual * 17
    assert all(0 < slow < 10 for slow in slowness(dict.fromkeys([A], rates[0]) if rates else {}, 1.0).values())


def test_the_cards_have_the_tokens_of_a_pass_and_the_seats() -> None:
    def card(tokens: int | None, seats: int | None) -> ModelRuntimeConfig:
        return ModelRuntimeConfig(max_num_batched_tokens=tokens, max_num_seqs=seats)

    assert costs_of(cards=[card(2048, 64), card(4096, 256), card(16_384, 128)]) == EngineCosts(
        batch_tokens=4096, seats=256
    )
    assert costs_of(cards=[card(2048, 64), card(None, None)]) == EngineCosts(batch_tokens=2048)
    assert costs_of(cards=[card(0, 0)]) == USUAL


def test_a_report_of_what_no_pass_takes_is_logged_once_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    reports = ReportedRates()
    for _ in range(3):
        reports.take_in(A, evolve(ENGINE, held_token_ps=MOST_PS + 1), 0.0)
    assert reports.known(1.0) == {}
    assert caplog.text.count("what no pass takes") == 1


def test_a_report_counts_from_the_next_moment_on() -> None:
    """What else happens in the same moment may come before it or after it."""
    reports = ReportedRates()
    reports.take_in(A, ENGINE, 3.0)
    assert reports.known(3.0) == {}
    reports.take_in(A, ENGINE, 4.0)  # repeated
    assert reports.known(4.0) == {A: ENGINE}


# -- beside what is observed


def observed(*reporting: WorkerRank, of: dict[WorkerRank, float]) -> PaceMeter:
    """A minute with ten requests a second; each rank takes so many times as long, and some report that."""
    meter, rng = PaceMeter(), Random(1)
    for rank in reporting:
        meter.reports.take_in(rank, times(ENGINE, of[rank]), 0.0)
    for second in range(60):
        meter.pace(float(second))
        for rank, factor in of.items():
            for _ in range(5):
                tokens = rng.randrange(500, 20_000)
                meter.booked(0, tokens, tokens)
                meter.answered(rank, tokens, factor * (0.016 + 0.000_016 * tokens))
                meter.ended(100, factor)
    return meter


def test_reported_speeds_come_before_those_observed() -> None:
    of = {A: 1.0, B: 2.0}
    seen, told = (observed(*who, of=of).pace(60.0) for who in ((), (A, B)))
    assert seen.slowness[B] / seen.slowness[A] != pytest.approx(2**0.5, rel=0.01)
    assert told.slowness[B] / told.slowness[A] == pytest.approx(2**0.5)
    assert told.costs != seen.costs == USUAL


def test_ranks_that_do_not_report_are_as_observed_and_the_others_beside_them() -> None:
    of = {A: 1.0, B: 2.0, C: 1.0, D: 2.0}
    seen, found = (observed(*who, of=of).pace(60.0).slowness for who in ((), (A, B)))
    assert (found[C], found[D]) == (seen[C], seen[D])
    assert found[B] / found[A] == pytest.approx(2**0.5)
    assert found[A] * found[B] == pytest.approx(seen[A] * seen[B])


def test_workers_that_are_alike_have_no_slowness_whether_they_report_or_not() -> None:
    of = dict.fromkeys((A, B, C, D), 1.0)
    for reporting in ((), (A, B), (A, B, C, D)):
        assert observed(*reporting, of=of).pace(60.0).slowness == {}


def test_a_worker_that_restarts_under_its_id_loses_its_report() -> None:
    meter = observed(A, B, of={A: 1.0, B: 2.0})
    meter.pace(60.0)
    meter.forget(B.worker_id)
    assert meter.reports.known(61.0) == {A: ENGINE}
    assert B not in meter.pace(61.5).slowness


# -- for a seat


def delay(requests: int, costs: EngineCosts, held: int = 0) -> float:
    loads = RankLoads([0], [held], [requests], [1])
    return marginal_delays(Prompt(64, 64), [0], loads, Pace(answer_tokens=300.0, costs=costs))[0]


def test_a_request_waits_for_a_seat_where_all_are_taken() -> None:
    seats = EngineCosts(seats=10)
    for requests in range(10):
        assert delay(requests, seats) == delay(requests, USUAL)
    for waiting in range(1, 5):
        more = delay(9 + waiting, seats, held=30) - delay(9 + waiting, USUAL, held=30)
        assert more == pytest.approx(waiting * 300 / 10 * (USUAL.step_tokens + USUAL.step * 64 * 30))


def test_answers_of_one_token_have_no_seats() -> None:
    loads = RankLoads([0], [0], [50], [1])
    one, other = (
        marginal_delays(Prompt(64, 64), [0], loads, Pace(pause_weight=0.0, costs=costs))
        for costs in (USUAL, EngineCosts(seats=10))
    )
    assert one == other


# -- the event


def test_an_event_of_another_version_is_read() -> None:
    """Unknown keys are left out, and what is missing is not known, both ways."""
    event = RankRates(7, ENGINE, 1)
    newer = {
        "worker_id": 7,
        "rates": {"pass_ps": 16_000_000_000, "prompt_token_ps": 5, "draft_ps": 1},
        "dp_rank": 1,
        "device": "new",
    }
    for read in (record_reader(RankRates), lambda data: from_msgpack(data, RankRates)):
        assert read(to_msgpack(event)) == event
        assert read(to_msgpack(newer)) == RankRates(7, PassRates(16_000_000_000, 5), 1)
        assert read(to_msgpack({"worker_id": 7, "rates": {}})) == RankRates(7, PassRates())


@pytest.mark.parametrize("wrong", [-1, 0.5, float("nan"), float("inf"), "1"])
def test_a_rate_that_is_no_whole_number_of_64_bits_is_refused(wrong: Any) -> None:
    event = {"worker_id": 7, "rates": {"step_ps": wrong}}
    for read in (record_reader(RankRates), lambda data: from_msgpack(data, RankRates)):
        with pytest.raises(InvalidArgument):
            read(to_msgpack(event))


async def test_reports_reach_a_router_of_another_process() -> None:
    async with deployment() as made, made.process() as here, made.process() as front:
        router = router_of(1, 2, config={"router_placement": "marginal_delay"})
        router.follow_rates(rate_reports(front.events, "dynamo.backend.generate"))
        send = here.events.publisher(Scope("dynamo", "backend"), KV_RATES_TOPIC).publish
        await anyio.sleep(1)
        for report in (
            RankRates(1, ENGINE),
            RankRates(2, times(ENGINE, 2.0)),
            RankRates(9, ENGINE),
            RankRates(1, ENGINE, 5),
        ):
            send(report)
        send({"worker_id": 1, "rates": {"step_ps": -4}})  # refused where it is read
        send({"worker_id": 1, "rates": {"later": 1}, "more": 2})
        await anyio.sleep(1)
        meter = router.loads._meter
        assert meter is not None
        assert meter.reports.known(router.loads.now_s()) == {A: PassRates(), B: times(ENGINE, 2.0)}
        router.close()


# -- the choice


async def test_a_worker_that_reports_that_it_is_faster_takes_more() -> None:
    taken = []
    for factor in (1.0, 2.0):
        router, reports = router_of(1, 2, config={"router_placement": "marginal_delay"}), Subject[RankRates]()
        router.follow_rates(reports)
        reports.on_next(RankRates(1, ENGINE))
        reports.on_next(RankRates(2, times(ENGINE, factor)))
        await anyio.sleep(1.5)
        for number in range(60):
            await reserved(router, prompt(400, first=1000 * number), str(number))
        loads = router.loads.sequences.project([], (A, B), router.loads.now_s())
        taken.append(loads.requests[0])
        router.close()
    assert abs(taken[0] - 30) <= 2
    assert taken[1] >= 33


async def test_a_report_of_a_worker_that_was_there_before_it_restarted_is_not_used() -> None:
    health, reports = GivenHealth(1, 2), Subject[RankRates]()
    router = router_of(1, 2, config={"router_placement": "marginal_delay"}, health=health)
    router.follow_rates(reports)
    for worker_id, factor in ((1, 1.0), (2, 3.0)):
        reports.on_next(RankRates(worker_id, times(ENGINE, factor)))
    await anyio.sleep(1)
    assert router.loads.pace(router.loads.now_s()).slowness[B] > 1.2
    health.set(1)
    health.set(1, 2)
    await anyio.sleep(2)
    assert router.loads.pace(router.loads.now_s()).slowness == {}


async def test_the_seats_of_a_rank_are_in_the_cards_of_the_workers() -> None:
    cards = {worker_id: ModelRuntimeConfig(max_num_seqs=4) for worker_id in (1, 2)}
    router = router_of(1, 2, config={"router_placement": "marginal_delay"}, health=published(cards))
    for number in range(6):
        await reserved(router, prompt(8, first=100 * number, worker_id=1), str(number))
    await reserved(router, prompt(40_000, first=10**6, worker_id=2), "long")
    assert router.loads.pace(router.loads.now_s()).costs.seats == 4
    assert router.advise(prompt(8, first=10**7)).rank == B


async def test_a_router_that_places_by_cost_reads_no_reports() -> None:
    router, reports = router_of(1, 2), Subject[RankRates]()
    router.follow_rates(reports)
    reports.on_next(RankRates(2, times(ENGINE, 9.0)))
    await anyio.sleep(2)
    assert router.loads.pace(router.loads.now_s()) is UNOBSERVED
