"""Which workers may take a request: order of the checks, pins, taints, overloaded workers, and the errors."""

from __future__ import annotations

import math

import pytest

from operators.kv import PromptBlocks, RouteRequest
from operators.kv.eligibility import RoutingRules, WorkerPool, narrowed_to_adapter, taint_multiplier, worker_ranks
from operators.kv.types import WorkerRank
from pipeline import InvalidArgument, ResourceExhausted, Unavailable, WorkerOverloaded
from pipeline.protocols import RoutingConstraints
from pipeline.protocols.card import ModelRuntimeConfig

PLAIN = RoutingRules()


def config(*taints: str, start: int = 0, size: int = 1) -> ModelRuntimeConfig:
    return ModelRuntimeConfig(taints=set(taints), data_parallel_start_rank=start, data_parallel_size=size)


def requiring(*taints: str, allowed: set[int] | None = None) -> RoutingRules:
    return RoutingRules(None, allowed, RoutingConstraints(required_taints=set(taints)))


def worker_ids(pool: WorkerPool, rules: RoutingRules = PLAIN) -> list[int]:
    return [rank.worker_id for rank in pool.candidates(rules).ranks]


def test_every_rank_of_every_worker_is_a_candidate_in_order() -> None:
    pool = WorkerPool({9: config(), 7: config(start=2, size=3)})
    assert pool.candidates(PLAIN).ranks == ((7, 2), (7, 3), (7, 4), (9, 0))


def test_requests_without_rules_share_their_candidates() -> None:
    pool = WorkerPool({1: config(), 2: config()})
    assert pool.candidates(PLAIN).ranks is pool.candidates(RoutingRules()).ranks
    liked = pool.candidates(RoutingRules(constraints=RoutingConstraints(preferred_taints={"a": 1.0})))
    assert liked.ranks is pool.candidates(PLAIN).ranks


def test_a_rank_outside_its_worker_is_unavailable_and_the_error_names_the_range() -> None:
    pool = WorkerPool({7: config(start=2, size=3)})
    refusal = pool.check(PLAIN, WorkerRank(7, 5))
    assert refusal is not None
    assert (refusal.reason, "ranks 2 to 4" in refusal.message) == ("rank_unavailable", True)
    with pytest.raises(Unavailable, match="ranks 2 to 4"):
        pool.candidates(RoutingRules(pinned=WorkerRank(7, 5)))


def test_required_taints_must_all_be_there() -> None:
    only_a = WorkerPool({1: config("mdc-a")})
    with pytest.raises(Unavailable):
        only_a.candidates(requiring("mdc-b"))
    both = WorkerPool({1: config("mdc-a"), 2: config("mdc-b", "mdc-c")})
    assert worker_ids(both, requiring("mdc-b")) == [2]
    assert worker_ids(both, requiring("mdc-b", "mdc-c")) == [2]


def test_overloaded_workers_are_left_out_until_none_is_left() -> None:
    configs = {1: config(), 2: config()}
    assert worker_ids(WorkerPool(configs, overloaded={1})) == [2]
    with pytest.raises(ResourceExhausted):
        WorkerPool(configs, overloaded={1, 2}).candidates(PLAIN)


def test_allowed_workers_and_overload_and_taints_all_hold() -> None:
    pool = WorkerPool({n: config("t") for n in (1, 2, 3)}, overloaded={2})
    assert worker_ids(pool, requiring("t", allowed={1, 2})) == [1]
    with pytest.raises(ResourceExhausted):
        pool.candidates(requiring("t", allowed={2}))


def test_workers_that_cannot_be_reached_are_left_out() -> None:
    configs = {1: config(), 2: config()}
    assert worker_ids(WorkerPool(configs, available={2, 5})) == [2]
    with pytest.raises(Unavailable):
        WorkerPool(configs, available=set()).candidates(PLAIN)


def test_no_worker_at_all_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        WorkerPool({}).candidates(PLAIN)


def test_the_first_reason_in_order_is_given() -> None:
    """Each case mends the reason before it."""
    rank = WorkerRank(1, 3)
    configs = {1: config("a", size=2)}
    needs = RoutingConstraints(required_taints={"b"})
    nothing = WorkerPool({}, available=set())
    cases = [
        (nothing, RoutingRules(None, {2}, needs), "not_allowed"),
        (nothing, RoutingRules(None, {1}, needs), "not_routable"),
        (WorkerPool({}, available={1}), RoutingRules(None, {1}, needs), "unknown_worker"),
        (WorkerPool(configs, {1}, {1}), RoutingRules(None, {1}, needs), "rank_unavailable"),
        (WorkerPool({1: config("a", size=4)}, {1}, {1}), RoutingRules(None, {1}, needs), "taints"),
        (WorkerPool({1: config("b", size=4)}, {1}, {1}), RoutingRules(None, {1}, needs), "overloaded"),
        (WorkerPool({1: config("b", size=4)}, {1}), RoutingRules(None, {1}, needs), None),
    ]
    for pool, rules, reason in cases:
        refusal = pool.check(rules, rank)
        assert (None if refusal is None else refusal.reason) == reason


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        (RoutingRules(WorkerRank(1), {2}), InvalidArgument),
        (RoutingRules(WorkerRank(3)), Unavailable),
        (RoutingRules(WorkerRank(1), None, RoutingConstraints(required_taints={"x"})), Unavailable),
        (RoutingRules(WorkerRank(2)), WorkerOverloaded),
    ],
)
def test_a_pinned_request_is_never_sent_elsewhere(rules: RoutingRules, error: type[Exception]) -> None:
    pool = WorkerPool({1: config(), 2: config()}, overloaded={2})
    with pytest.raises(error):
        pool.candidates(rules)


def test_a_pinned_request_has_its_one_candidate() -> None:
    pool = WorkerPool({1: config(size=2), 2: config()})
    assert pool.candidates(RoutingRules(pinned=WorkerRank(1, 1))).ranks == ((1, 1),)


def test_a_worker_with_one_rank_needs_none_named() -> None:
    pool = WorkerPool({1: config(start=4), 2: config(size=2)})
    one, two, unknown = (RouteRequest(blocks=PromptBlocks([1], 1), worker_id=worker_id) for worker_id in (1, 2, 3))
    assert [request.rules(pool).pinned for request in (one, unknown)] == [(1, 4), (3, 0)]
    with pytest.raises(InvalidArgument, match="ranks 0 to 1: the request must name one"):
        two.rules(pool)


def test_taints_multiply_between_one_over_e_and_e() -> None:
    assert taint_multiplier({"a": 0.85, "b": 9.0}, {"a", "c"}) == pytest.approx(math.exp(-math.tanh(0.85)))
    assert taint_multiplier({"a": 1e9}, {"a"}) == pytest.approx(1 / math.e)
    assert taint_multiplier({"a": -1e9}, {"a"}) == pytest.approx(math.e)
    assert taint_multiplier({"a": 5.0}, {"b"}) == 1.0
    assert taint_multiplier({"a": 1.0, "b": -1.0}, {"a", "b"}) == 1.0


@pytest.mark.parametrize("weights", [[math.nan], [math.inf, -math.inf], [-math.inf]])
def test_a_weight_that_is_not_finite_is_refused_by_name(weights: list[float]) -> None:
    preferred = {f"t{n}": weight for n, weight in enumerate(weights)}
    pool = WorkerPool({1: config(*preferred)})
    with pytest.raises(InvalidArgument) as refused:
        pool.candidates(RoutingRules(constraints=RoutingConstraints(preferred_taints=preferred)))
    assert refused.value.field == "routing.routing_constraints.preferred_taints"


@pytest.mark.parametrize(("sign", "multiplier"), [(1, 1 / math.e), (-1, math.e)])
def test_weights_whose_sum_no_number_holds_are_as_good_as_large_ones(sign: int, multiplier: float) -> None:
    preferred = {"a": sign * 1.7e308, "b": sign * 1.7e308}
    assert taint_multiplier(preferred, {"a", "b"}) == pytest.approx(multiplier)


def test_an_adapter_narrows_the_allowed_workers_and_never_widens_them() -> None:
    assert narrowed_to_adapter(None, {1, 2}, {1, 2, 3}) == {1, 2}
    assert narrowed_to_adapter({2, 3}, {1, 2}, {1, 2, 3}) == {2}
    assert narrowed_to_adapter({3}, {1, 2}, {1, 2, 3}) == {3}
    assert narrowed_to_adapter(None, {9}, {1, 2}) is None
    assert narrowed_to_adapter({1, 9}, {9}, {1, 2}) == {1, 9}, "the one that has it is not there"


@pytest.mark.parametrize(
    ("start", "size", "field"), [(0, 0, "data_parallel_size"), (2**32 - 1, 2, "data_parallel_start_rank")]
)
def test_a_range_of_ranks_must_be_one(start: int, size: int, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        worker_ranks(config(start=start, size=size))
    assert refused.value.field == field
