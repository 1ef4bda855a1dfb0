"""AdmissionQueue: order inside a class, turns between classes, partitions, limits, and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import KvRouterConfig
from operators.kv.errors import QueueRejected
from operators.kv.index import CandidateOverlap, Overlap
from operators.kv.queue import AdmissionQueue, DepthTier, PolicyClass, PolicyProfile, PromptSize, Waiting
from operators.kv.types import RequestSettings, WorkerRank
from pipeline import InvalidArgument, ResourceExhausted, Unavailable
from pipeline.protocols.card import ModelRuntimeConfig

UNIT = PromptSize(1)
QueuePolicy = Literal["fcfs", "lcfs", "wspt"]


def one_class(queue_policy: QueuePolicy = "fcfs", **settings: Any) -> AdmissionQueue[str]:
    settings = {"prefill_busy_threshold": 0, **settings}
    return AdmissionQueue(PolicyProfile.single(PolicyClass(queue_policy=queue_policy, **settings)))


def classes(*quanta: int) -> AdmissionQueue[str]:
    """A class of each quantum, which requests name by position."""
    rows = [PolicyClass(f"c{n}", quantum=quantum) for n, quantum in enumerate(quanta)]
    return AdmissionQueue(PolicyProfile(rows, "c0", {row.name: [n] for n, row in enumerate(rows)}))


def push(queue: AdmissionQueue[str], item: str, size: PromptSize = UNIT, **settings: Any) -> Waiting[str]:
    return queue.push(item, size, **{"class_index": 0, "workers": 1, "arrival_s": 0.0, **settings})


def anyone(_: Waiting[str]) -> bool:
    return True


def drained(queue: AdmissionQueue[str], may_go: Callable[[Waiting[str]], bool] = anyone) -> list[str]:
    items = []
    while (waiting := queue.pop(may_go)) is not None:
        items.append(waiting.item)
    return items


def test_a_jump_is_seconds_off_the_arrival() -> None:
    queue = one_class()
    push(queue, "A", arrival_s=0.0)
    push(queue, "B", arrival_s=5.0, priority_jump_s=50.0)
    push(queue, "C", arrival_s=6.0, priority_jump_s=-9.0)
    push(queue, "D", arrival_s=6.5)
    assert drained(queue) == ["B", "A", "C", "D"]


def test_last_come_first_served_turns_the_arrival_around() -> None:
    queue = one_class("lcfs")
    for item, arrival_s in [("A", 0.0), ("B", 1.0), ("C", 2.0)]:
        push(queue, item, arrival_s=arrival_s)
    assert drained(queue) == ["C", "B", "A"]


@pytest.mark.parametrize(
    ("candidates", "cached_tokens", "key"),
    [([0, 1, 2, 3], 960, 1 / 64), ([4], 16, 1 / 1008), ([5], 0, 1 / 1024), ([6], 1600, 1)],
)
def test_the_weight_of_a_prompt_is_what_its_best_worker_must_compute(
    candidates: list[int], cached_tokens: int, key: float
) -> None:
    overlap = Overlap(device={WorkerRank(n): blocks for n, blocks in enumerate([10, 20, 50, 60, 1, 0, 100])})
    seen = CandidateOverlap(overlap, {WorkerRank(n): 0 for n in candidates})
    assert seen.best_cached_tokens(RequestSettings(), 16) == cached_tokens
    assert PolicyClass(queue_policy="wspt").score(PromptSize(1024, cached_tokens), 99.0, 0.0) == key
    assert PolicyClass(queue_policy="wspt").score(PromptSize(1024, cached_tokens), 99.0, 3.0) == 4 * key


def test_less_work_goes_first_by_weight() -> None:
    queue = one_class("wspt")
    for item, size in [("long", PromptSize(900)), ("cached", PromptSize(1000, 990)), ("short", PromptSize(100))]:
        push(queue, item, size)
    assert drained(queue) == ["cached", "short", "long"]


@pytest.mark.parametrize("queue_policy", ["fcfs", "lcfs", "wspt"])
def test_strict_priority_comes_before_everything(queue_policy: QueuePolicy) -> None:
    queue = one_class(queue_policy)
    push(queue, "jumping", PromptSize(1), arrival_s=50.0, priority_jump_s=1e6)
    push(queue, "strict", PromptSize(9999), arrival_s=60.0, strict_priority=1)
    assert drained(queue) == ["strict", "jumping"]


def test_equal_keys_go_in_order_of_arrival() -> None:
    queue = one_class()
    for item in "abcde":
        push(queue, item)
    assert drained(queue) == list("abcde")


def test_a_backlog_is_not_bypassed() -> None:
    queue = one_class()
    assert not queue.must_queue(0, lambda: False)
    assert queue.must_queue(0, lambda: True)
    push(queue, "first")
    assert queue.must_queue(0, lambda: pytest.fail("a backlog decides already"))


def test_without_a_threshold_no_request_waits() -> None:
    off = AdmissionQueue[str](PolicyProfile.from_config(KvRouterConfig(router_queue_threshold=None)))
    push(off, "left over")
    assert not off.must_queue(0, lambda: True)


def test_the_plain_settings_make_one_class() -> None:
    config = KvRouterConfig(router_queue_threshold=2.0, router_queue_policy="wspt")
    (one,) = PolicyProfile.from_config(config).classes
    assert (one.queue_policy, one.prefill_busy_threshold_frac, one.may_queue) == ("wspt", 2.0, True)


def test_a_rank_is_busy_above_either_threshold() -> None:
    share, absolute = PolicyClass(prefill_busy_threshold_frac=2.0), PolicyClass(prefill_busy_threshold=50)
    both = PolicyClass(prefill_busy_threshold_frac=2.0, prefill_busy_threshold=50)
    assert [tokens > share.busy_above(100) for tokens in (200, 201)] == [False, True]
    assert [tokens > absolute.busy_above(100) for tokens in (50, 51)] == [False, True]
    assert [both.busy_above(100) < 51, both.busy_above(10) < 21, both.busy_above(10) < 20] == [True, True, False]
    assert [tokens > share.busy_above(None) for tokens in (20_000_000, 20_000_001)] == [False, True]
    assert share.busy_above(0) < 1, "a worker that says 0 is taken at its word"
    assert PolicyClass().busy_above(1) >= 10**12


def test_all_must_be_busy_and_an_empty_pool_is_not_busy() -> None:
    policy, configs = PolicyClass(prefill_busy_threshold=10), {0: ModelRuntimeConfig(), 1: ModelRuntimeConfig()}
    ranks = [WorkerRank(0), WorkerRank(1)]
    assert policy.all_busy(ranks, [11, 11], configs)
    assert not policy.all_busy(ranks, [11, 10], configs)
    assert not policy.all_busy([], [], configs)


def test_one_that_left_is_not_served_and_no_longer_counted() -> None:
    queue = one_class()
    waiting = [push(queue, item, PromptSize(10, 4)) for item in "abc"]
    assert queue.withdraw(waiting[1])
    assert not queue.withdraw(waiting[1])
    assert (len(queue), queue.usage(0).isl_tokens, queue.usage(0).cached_tokens) == (2, 20, 8)
    assert drained(queue) == ["a", "c"]
    assert not queue.withdraw(waiting[0])
    assert (len(queue), queue.usage(0).isl_tokens, queue.usage(0).cached_tokens) == (0, 0, 0)


def test_limits_are_compared_before_adding_and_grow_with_the_workers() -> None:
    queue = one_class(
        request_queue_limit_per_worker=1,
        raw_isl_token_queue_limit_per_worker=5,
        cached_token_queue_limit_per_worker=3,
    )
    push(queue, "a", PromptSize(8, 4), workers=2)
    push(queue, "b", PromptSize(100, 100), workers=2)
    with pytest.raises(QueueRejected) as full:
        push(queue, "c", workers=2)
    assert (full.value.limit_kind, full.value.current, full.value.limit) == ("requests", 2, 2)
    assert (queue.usage(0).isl_tokens, queue.usage(0).cached_tokens) == (108, 104)
    assert isinstance(full.value, ResourceExhausted)


def test_no_more_than_the_prompt_counts_as_cached() -> None:
    queue = one_class()
    waiting = push(queue, "a", PromptSize(8, 100))
    assert queue.usage(0).cached_tokens == 8
    queue.withdraw(waiting)
    assert queue.usage(0).cached_tokens == 0


def test_the_limits_are_checked_in_their_order() -> None:
    queue = one_class(raw_isl_token_queue_limit_per_worker=5, cached_token_queue_limit_per_worker=3)
    push(queue, "a", PromptSize(4, 4))
    with pytest.raises(QueueRejected) as full:
        push(queue, "b")
    assert full.value.limit_kind == "cached_tokens"


def test_a_lost_worker_lowers_the_limit_and_evicts_no_request() -> None:
    queue = one_class(raw_isl_token_queue_limit_per_worker=10)
    push(queue, "a", PromptSize(11), workers=2)
    with pytest.raises(QueueRejected) as full:
        push(queue, "b", workers=1)
    assert (full.value.current, full.value.limit) == (11, 10)
    push(queue, "c", PromptSize(10), workers=2)
    with pytest.raises(QueueRejected) as full:
        push(queue, "d", workers=2)
    assert (full.value.current, full.value.limit) == (21, 20)
    assert drained(queue) == ["a", "c"]


@pytest.mark.parametrize(("limit", "workers"), [(0, 5), (5, 0)])
def test_a_limit_of_zero_or_no_worker_lets_nothing_in(limit: int, workers: int) -> None:
    queue = one_class(request_queue_limit_per_worker=limit)
    with pytest.raises(QueueRejected):
        push(queue, "a", workers=workers)


def test_prompts_that_miss_more_may_have_less_in_front_of_them() -> None:
    profile = PolicyProfile.single(PolicyClass(prefill_busy_threshold=0))
    queue = AdmissionQueue[str](profile, [DepthTier(0, 100), DepthTier(50, 30)])
    push(queue, "a", PromptSize(60, 30), workers=1)
    push(queue, "b", PromptSize(49), workers=1)
    with pytest.raises(QueueRejected) as full:
        push(queue, "c", PromptSize(50), workers=3)
    assert (full.value.current, full.value.limit) == (109, 90)
    assert "queued_isl_tokens=109, max_queued_isl_tokens=90" in full.value.message
    with pytest.raises(QueueRejected):
        push(queue, "d", PromptSize(1), workers=1)
    push(queue, "e", PromptSize(50), workers=4)


@pytest.mark.parametrize(
    "tiers",
    [[DepthTier(1, 5)], [DepthTier(0, 0)], [DepthTier(0, 5), DepthTier(0, 6)], [DepthTier(0, 1), DepthTier(5, 0)]],
)
def test_tiers_begin_at_zero_rise_and_hold_something(tiers: list[DepthTier]) -> None:
    with pytest.raises(InvalidArgument):
        AdmissionQueue[str](PolicyProfile.single(PolicyClass()), tiers)


def test_a_head_dearer_than_its_quantum_is_served_at_once_where_it_is_alone() -> None:
    queue = classes(4, 1)
    push(queue, "dear", PromptSize(101), class_index=0)
    push(queue, "blocked", class_index=1)
    served = queue.pop(lambda waiting: waiting.item != "blocked")
    assert served is not None
    assert served.item == "dear"


def test_a_class_that_would_never_have_a_turn_is_refused() -> None:
    with pytest.raises(InvalidArgument) as refused:
        PolicyClass(quantum=0)
    assert refused.value.field == "quantum"


def test_classes_are_served_by_their_quanta() -> None:
    queue = classes(1, 3)
    for item in "1333" * 8:
        push(queue, item, class_index=0 if item == "1" else 1)
    assert "".join(drained(queue)[:16]) == "1333" * 4


def test_a_class_continues_its_turn_after_a_time_in_which_no_request_could_go() -> None:
    """Mostly there is room for one only, and each drain looks once more in vain."""
    queue, served = classes(1, 3), ""
    for item in "1333" * 8:
        push(queue, item, class_index=0 if item == "1" else 1)
    for _ in range(16):
        waiting = queue.pop(anyone)
        assert waiting is not None
        served += waiting.item
        assert queue.pop(lambda _: False) is None
    assert served == "1333" * 4


def test_a_class_whose_turn_it_is_but_may_not_go_lets_others_pass() -> None:
    queue = classes(1, 3)
    for item in "1333" * 2:
        push(queue, item, class_index=0 if item == "1" else 1)
    assert [waiting.item for _ in range(2) if (waiting := queue.pop(anyone))] == ["1", "3"]
    passed = queue.pop(lambda waiting: waiting.class_index == 0)
    assert passed is not None
    assert (passed.item, queue._classes[1].deficit) == ("1", 2)


def test_blocked_classes_gain_nothing_and_emptied_ones_lose_what_they_had() -> None:
    queue = classes(2, 2)
    push(queue, "x", class_index=0)
    blocked = [push(queue, f"b{n}", class_index=1) for n in range(4)]
    assert drained(queue, lambda waiting: waiting.class_index == 0) == ["x"]
    assert [one.deficit for one in queue._classes] == [0, 0]
    for waiting in blocked:
        queue.withdraw(waiting)
    assert drained(queue) == []


def test_a_pin_to_a_busy_worker_does_not_hold_up_another() -> None:
    queue = one_class()
    push(queue, "for 1", partition=WorkerRank(1))
    push(queue, "for 1 too", partition=WorkerRank(1))
    push(queue, "for 2", partition=WorkerRank(2))
    push(queue, "any", partition=None)
    assert drained(queue, lambda waiting: waiting.partition == WorkerRank(2)) == ["for 2"]
    assert drained(queue) == ["for 1", "for 1 too", "any"]


def test_a_blocked_head_blocks_its_partition() -> None:
    queue = one_class()
    push(queue, "first")
    push(queue, "second")
    assert queue.pop(lambda waiting: waiting.item == "second") is None


def test_each_admission_is_seen_by_the_next_question() -> None:
    queue, room = one_class(), ["slot", "slot"]
    for item in "abc":
        push(queue, item)
    served = []
    while (waiting := queue.pop(lambda _: bool(room))) is not None:
        room.pop()
        served.append(waiting.item)
    assert (served, len(queue)) == (["a", "b"], 1)


def test_closing_hands_back_all_that_wait_and_lets_nothing_more_in() -> None:
    queue = classes(1, 1)
    for item, index in [("a", 1), ("b", 0), ("c", 1)]:
        push(queue, item, class_index=index)
    assert [waiting.item for waiting in queue.close()] == ["a", "b", "c"]
    assert (queue.close(), len(queue), queue.pop(anyone)) == ([], 0, None)
    with pytest.raises(Unavailable):
        push(queue, "late")


@pytest.mark.parametrize(("now_s", "after_s", "due"), [(10.0, 10.0, False), (10.1, 10.0, True), (99.0, None, False)])
def test_what_waited_long_is_looked_up_again(now_s: float, after_s: float | None, due: bool) -> None:
    assert push(one_class(), "a").is_due_for_refresh(now_s, after_s) == due


Parked = tuple[int, int, int, int, int]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 5), max_size=30), st.sampled_from(["fcfs", "lcfs", "wspt"]))
def test_one_class_serves_in_sorted_order(rows: list[Parked], queue_policy: QueuePolicy) -> None:
    queue, expected = one_class(queue_policy), []
    for number, (strict, jump, arrival, isl, cached) in enumerate(rows):
        size = PromptSize(isl, cached)
        push(
            queue,
            str(number),
            size,
            strict_priority=strict,
            priority_jump_s=float(jump),
            arrival_s=float(arrival),
            partition=(isl if strict else None),
        )
        key = {"fcfs": jump - arrival, "lcfs": jump + arrival, "wspt": (1 + jump) / max(1, isl - cached)}
        expected.append((-strict, -key[queue_policy], number))
    assert drained(queue) == [str(number) for *_, number in sorted(expected)]


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=40),
)
def test_every_request_is_served_once_and_no_class_starves(quanta: list[int], rows: list[tuple[int, int]]) -> None:
    """While all have work, what a class was served stays within a quantum and a prompt of its share."""
    queue, work = classes(*quanta), {}
    for number, (index, tokens) in enumerate(rows):
        work[str(number)] = (index % len(quanta), tokens)
        push(queue, str(number), PromptSize(tokens), class_index=index % len(quanta))
    served, given_out = [0] * len(quanta), []
    while (waiting := queue.pop(anyone)) is not None:
        index, tokens = work[waiting.item]
        given_out.append(waiting.item)
        served[index] += tokens
        if all(queue.usage(n).requests for n in range(len(quanta))):
            rounds = [served[n] / quantum for n, quantum in enumerate(quanta)]
            dearest = max(tokens for _, tokens in rows)
            assert max(rounds) - min(rounds) <= 2 + 2 * dearest / min(quanta)
    assert sorted(given_out) == sorted(work)
    assert len(queue) == 0
