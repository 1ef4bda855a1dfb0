"""Handoff: which action follows which fact, and that every side that may own blocks is cancelled when it goes wrong."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.mocker.args import WorkerType
from engines.mocker.transfer import (
    ActionKind,
    ActionOutcome,
    EndReason,
    Handoff,
    HandoffAction,
    HandoffFact,
    HandoffOrder,
    TransferTiming,
    handoff_delay_ms,
    handoff_order,
)
from pipeline import ContractViolation, InvalidArgument

ORDERS = get_args(HandoffOrder)
REASONS = get_args(EndReason)
CANCELS = (ActionKind.CANCEL_SOURCE, ActionKind.CANCEL_DESTINATION)

NOT_MODELLED = TransferTiming(128)
MISSING_ONLY = TransferTiming(128, 1_000_000, 1.0, "destination_missing")

OUTCOMES = {
    ActionKind.SUBMIT_PREFILL: ActionOutcome.SUBMITTED,
    ActionKind.RESERVE_DESTINATION: ActionOutcome.ACCEPTED,
    ActionKind.START_TRANSFER: ActionOutcome.SCHEDULED,
}
"""What a driver reports of each action; of all others, that it was applied."""
FACTS = {
    ActionKind.SUBMIT_PREFILL: HandoffFact.SOURCE_HELD,
    ActionKind.RESERVE_DESTINATION: HandoffFact.DESTINATION_RESERVED,
    ActionKind.START_TRANSFER: HandoffFact.TRANSFER_COMPLETED,
}
TAIL = ["start_transfer", "activate_destination", "release_source", "complete"]
SEQUENCE = {
    "source_first": ["submit_prefill", "reserve_destination", *TAIL],
    "destination_first": ["reserve_destination", "submit_prefill", *TAIL],
}


def acknowledge(handoff: Handoff, action: HandoffAction) -> list[HandoffAction]:
    return handoff.acknowledge(action.kind, OUTCOMES.get(action.kind, ActionOutcome.APPLIED))


def say(
    handoff: Handoff, fact: HandoffFact, timing: TransferTiming = NOT_MODELLED, missing: int = 0
) -> list[HandoffAction]:
    if fact is HandoffFact.SOURCE_HELD:
        return handoff.source_held(timing)
    if fact is HandoffFact.DESTINATION_RESERVED:
        return handoff.destination_reserved(missing)
    return handoff.transfer_completed()


def follow(
    handoff: Handoff, action: HandoffAction, timing: TransferTiming = NOT_MODELLED, missing: int = 0
) -> list[HandoffAction]:
    """Acknowledges the action and says its fact; gives what is due next."""
    due = acknowledge(handoff, action)
    return due + say(handoff, FACTS[action.kind], timing, missing) if action.kind in FACTS else due


def drive_to(handoff: Handoff, kind: ActionKind, timing: TransferTiming = NOT_MODELLED, missing: int = 0) -> Any:
    """Goes well until that action is due, and gives it."""
    (action,) = handoff.start()
    while action.kind is not kind:
        (action,) = follow(handoff, action, timing, missing)
    return action


def kinds(actions: list[HandoffAction]) -> list[str]:
    return [action.kind.value for action in actions]


@pytest.mark.parametrize("order", ORDERS)
def test_a_handoff_that_goes_well_takes_each_step_once_in_order(order: HandoffOrder) -> None:
    """MOCK-101, MOCK-103."""
    handoff = Handoff(order)
    taken = due = handoff.start()
    while due[0].kind is not ActionKind.COMPLETE:
        assert handoff.result is None
        due = follow(handoff, due[0])
        taken = taken + due
    assert kinds(taken) == SEQUENCE[order]
    assert handoff.result == "succeeded"
    assert handoff.is_ending


def test_each_engine_has_its_order() -> None:
    assert [handoff_order(engine) for engine in ("vllm", "trtllm", "sglang")] == [ORDERS[0], ORDERS[0], ORDERS[1]]
    with pytest.raises(InvalidArgument, match="vllm, trtllm, sglang") as raised:
        handoff_order("tgi")
    assert raised.value.field == "engine_type"


def test_an_unknown_order_is_refused() -> None:
    order: Any = "both_first"
    with pytest.raises(InvalidArgument, match="source_first, destination_first"):
        Handoff(order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("timing", "missing_tokens", "delay_ms"),
    [
        (TransferTiming(128, 1_000_000, 1.0), 5, 128.0),
        (MISSING_ONLY, 5, 5.0),
        (MISSING_ONLY, 0, 0.0),
        (NOT_MODELLED, 5, 0.0),
    ],
)
def test_the_transfer_takes_its_delay_and_is_a_step_even_without_one(
    order: HandoffOrder, timing: TransferTiming, missing_tokens: int, delay_ms: float
) -> None:
    """MOCK-104: the third row is a destination that has every block already."""
    handoff = Handoff(order)
    transfer = drive_to(handoff, ActionKind.START_TRANSFER, timing, missing_tokens)
    assert transfer == HandoffAction(ActionKind.START_TRANSFER, delay_ms)
    assert kinds(follow(handoff, transfer)) == ["activate_destination"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("is_acknowledged", [False, True])
@pytest.mark.parametrize("kind", [step for step in ActionKind if step.value in SEQUENCE["source_first"][:-1]])
def test_giving_up_cancels_every_side_that_may_own_blocks(
    order: HandoffOrder, reason: EndReason, is_acknowledged: bool, kind: ActionKind
) -> None:
    """MOCK-106: issued counts as owned, acknowledged or not."""
    handoff = Handoff(order)
    action = drive_to(handoff, kind)
    if is_acknowledged and kind in FACTS:
        assert acknowledge(handoff, action) == []
    issued = SEQUENCE[order][: SEQUENCE[order].index(kind.value) + 1]
    expected = [
        cancel
        for step, cancel in (("submit_prefill", CANCELS[0]), ("reserve_destination", CANCELS[1]))
        if step in issued
    ]
    cancels = handoff.give_up(reason)
    assert [cancel.kind for cancel in cancels] == expected
    ends = [handoff.acknowledge(cancel.kind, ActionOutcome.NOOP) for cancel in cancels]
    assert [kinds(end) for end in ends] == [[]] * (len(ends) - 1) + [["complete"]]
    assert handoff.result == reason


@pytest.mark.parametrize("order", ORDERS)
def test_a_lost_release_is_followed_by_cancels_and_no_second_release(order: HandoffOrder) -> None:
    """MOCK-107."""
    handoff = Handoff(order)
    release = drive_to(handoff, ActionKind.RELEASE_SOURCE)
    cancels = handoff.give_up("timed_out")
    assert [cancel.kind for cancel in cancels] == list(CANCELS)
    late = acknowledge(handoff, release)
    assert late == []
    assert acknowledge(handoff, cancels[0]) == []
    assert kinds(acknowledge(handoff, cancels[1])) == ["complete"]
    assert handoff.result == "timed_out"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [step for step in ActionKind if step.value in SEQUENCE["source_first"][:-1]])
def test_a_failed_step_gives_up_and_its_own_side_is_cancelled_too(order: HandoffOrder, kind: ActionKind) -> None:
    handoff = Handoff(order)
    drive_to(handoff, kind)
    cancels = kinds(handoff.acknowledge(kind, ActionOutcome.FAILED))
    own = "cancel_destination" if "destination" in kind.value else "cancel_source"
    assert own in cancels
    assert handoff.is_ending
    assert handoff.result is None


def test_what_is_given_up_before_its_start_never_starts() -> None:
    handoff = Handoff("source_first")
    assert kinds(handoff.give_up("cancelled")) == ["complete"]
    assert handoff.start() == []
    assert handoff.result == "cancelled"


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_said_twice_is_ignored(order: HandoffOrder) -> None:
    handoff = Handoff(order)
    (action,) = handoff.start()
    assert handoff.start() == []
    while action.kind is not ActionKind.COMPLETE:
        before = action
        (action,) = follow(handoff, before)
        assert acknowledge(handoff, before) == []
        if before.kind in FACTS:
            assert say(handoff, FACTS[before.kind]) == []
    assert acknowledge(handoff, action) == []
    assert handoff.give_up("timed_out") == []
    assert handoff.result == "succeeded"


def test_giving_up_twice_keeps_the_first_reason() -> None:
    handoff = Handoff("source_first")
    handoff.start()
    (cancel,) = handoff.give_up("failed")
    assert handoff.give_up("timed_out") == []
    assert kinds(acknowledge(handoff, cancel)) == ["complete"]
    assert handoff.result == "failed"


def breach(rule: str) -> Any:
    return pytest.raises(ContractViolation, check=lambda error: error.rule == rule)


@pytest.mark.parametrize("order", ORDERS)
def test_h1_a_fact_before_its_acknowledged_action_is_an_error(order: HandoffOrder) -> None:
    handoff = Handoff(order)
    for fact in HandoffFact:
        with breach("H1"):
            say(handoff, fact)
    (action,) = handoff.start()
    while action.kind in FACTS:
        for fact in HandoffFact:
            if not handoff.has(fact):
                with breach("H1"):
                    say(handoff, fact)
        (action,) = follow(handoff, action)


def test_h2_an_acknowledgement_that_contradicts_the_first_is_an_error() -> None:
    handoff = Handoff("source_first")
    drive_to(handoff, ActionKind.START_TRANSFER)
    with breach("H2"):
        handoff.acknowledge(ActionKind.SUBMIT_PREFILL, ActionOutcome.FAILED)
    assert not handoff.is_ending


def test_h2_a_fact_that_contradicts_the_first_is_an_error() -> None:
    handoff = Handoff("source_first")
    drive_to(handoff, ActionKind.ACTIVATE_DESTINATION, MISSING_ONLY, 5)
    with breach("H2"):
        handoff.destination_reserved(6)
    with breach("H2"):
        handoff.source_held(NOT_MODELLED)


def test_h3_only_an_issued_action_is_acknowledged_and_only_as_it_can_go() -> None:
    handoff = Handoff("source_first")
    (submit,) = handoff.start()
    for kind in set(ActionKind) - {submit.kind}:
        with breach("H3"):
            handoff.acknowledge(kind, ActionOutcome.APPLIED)
    for outcome in set(ActionOutcome) - {ActionOutcome.SUBMITTED, ActionOutcome.FAILED}:
        with breach("H3"):
            handoff.acknowledge(submit.kind, outcome)
    assert acknowledge(handoff, submit) == []  # what was refused left no trace


def test_h4_a_cancel_that_failed_does_not_end_it() -> None:
    handoff = Handoff("source_first")
    handoff.start()
    (cancel,) = handoff.give_up("cancelled")
    with breach("H4"):
        handoff.acknowledge(cancel.kind, ActionOutcome.FAILED)
    assert handoff.result is None
    assert kinds(acknowledge(handoff, cancel)) == ["complete"]


def test_late_reports_of_steps_lead_to_nothing() -> None:
    handoff = Handoff("source_first")
    (submit,) = handoff.start()
    (cancel,) = handoff.give_up("cancelled")
    assert acknowledge(handoff, submit) == []
    assert handoff.source_held(NOT_MODELLED) == []
    assert kinds(acknowledge(handoff, cancel)) == ["complete"]
    assert handoff.source_held(NOT_MODELLED) == []


@pytest.mark.parametrize("value", [-1.0, nan, inf, -inf])
def test_a_timing_that_is_negative_or_not_finite_is_refused(value: float) -> None:
    with pytest.raises(InvalidArgument) as raised:
        TransferTiming(128, 1_000_000, value)
    assert raised.value.field == "bandwidth_gb_s"


def test_counts_below_zero_and_unknown_modes_are_refused() -> None:
    mode: Any = "half_prompt"
    refused: list[tuple[str, Any]] = [
        ("prompt_tokens", lambda: TransferTiming(-1)),
        ("kv_bytes_per_token", lambda: TransferTiming(1, -1)),
        ("mode", lambda: TransferTiming(1, mode=mode)),
        ("missing_tokens", lambda: MISSING_ONLY.delay_ms(-1)),
        ("missing_tokens", lambda: Handoff("source_first").destination_reserved(-1)),
    ]
    for name, make in refused:
        with pytest.raises(InvalidArgument) as raised:
            make()
        assert raised.value.field == name


@pytest.mark.parametrize("order", ORDERS)
def test_a_delay_without_end_is_refused_before_the_transfer_and_leaves_no_trace(order: HandoffOrder) -> None:
    handoff, endless = Handoff(order), TransferTiming(1, 10**300, 1e-20)
    (first,) = handoff.start()
    (second,) = follow(handoff, first, endless)
    assert acknowledge(handoff, second) == []
    with pytest.raises(InvalidArgument) as raised:
        say(handoff, FACTS[second.kind], endless)
    assert raised.value.field == "bandwidth_gb_s"
    assert not handoff.has(FACTS[second.kind])
    assert [cancel.kind for cancel in handoff.give_up("failed")] == list(CANCELS)


@pytest.mark.parametrize("timing", [TransferTiming(1, 10**400, 1.0), TransferTiming(1, 1, 5e-324)])
def test_a_delay_beyond_any_float_is_refused(timing: TransferTiming) -> None:
    with pytest.raises(InvalidArgument, match="never end"):
        timing.delay_ms(0)


@pytest.mark.parametrize(
    ("worker_type", "is_completed", "delay_ms"),
    [("prefill", True, 128.0), ("prefill", False, None), ("decode", True, None), ("aggregated", True, None)],
)
def test_only_a_completed_prefill_owes_a_delay(
    worker_type: WorkerType, is_completed: bool, delay_ms: float | None
) -> None:
    """MOCK-64, MOCK-65."""
    timing = TransferTiming(128, 1_000_000, 1.0)
    assert handoff_delay_ms(timing, 0, worker_type=worker_type, is_completed=is_completed) == delay_ms


@pytest.mark.parametrize("timing", [TransferTiming(8, None, 1.0), TransferTiming(8, 4), TransferTiming(8, 4, 0.0)])
def test_without_bytes_or_bandwidth_no_delay_is_modelled(timing: TransferTiming) -> None:
    assert timing.delay_ms(8) is None


class World:
    """Two sides of which the handoff sees only reports: late, repeated, and one in ten of a step that failed."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.owns, self.freed = Counter[str](), Counter[str]()
        self.issued: list[ActionKind] = []
        self.reports: list[tuple[Any, ActionOutcome]] = []

    def do(self, actions: list[HandoffAction]) -> None:
        for action in actions:
            assert ActionKind.COMPLETE not in self.issued
            assert action.kind not in self.issued
            self.issued.append(action.kind)
            if action.kind is not ActionKind.COMPLETE:
                self.reports.append((action.kind, self.outcome(action.kind)))

    def outcome(self, kind: ActionKind) -> ActionOutcome:
        """What taking the action comes to. A step that fails may have got its blocks all the same."""
        side = "destination" if "destination" in kind.value else "source"
        if kind not in CANCELS and self.rng.random() < 0.1:
            self.owns[side] += kind in (ActionKind.SUBMIT_PREFILL, ActionKind.RESERVE_DESTINATION)
            return ActionOutcome.FAILED
        if kind in CANCELS or kind is ActionKind.RELEASE_SOURCE:
            owned = self.owns.pop(side, 0)
            self.freed[side] += owned
            return ActionOutcome.APPLIED if owned else ActionOutcome.NOOP
        self.owns[side] += kind in (ActionKind.SUBMIT_PREFILL, ActionKind.RESERVE_DESTINATION)
        return OUTCOMES.get(kind, ActionOutcome.APPLIED)

    def report(self, handoff: Handoff) -> None:
        kind, outcome = self.reports.pop(self.rng.randrange(len(self.reports)))
        if isinstance(kind, HandoffFact):
            self.do(say(handoff, kind, MISSING_ONLY, 3))
            return
        self.do(handoff.acknowledge(kind, outcome))
        if kind in FACTS and outcome is not ActionOutcome.FAILED:
            self.reports.append((FACTS[kind], outcome))
        if self.rng.random() < 0.2:
            self.reports.append((kind, outcome))


@given(st.sampled_from(ORDERS), st.integers(0, 2**32))
def test_in_any_order_of_reports_each_side_is_freed_once_and_the_end_comes_last(order: HandoffOrder, seed: int) -> None:
    rng, handoff = Random(seed), Handoff(order)
    world = World(rng)
    world.do(handoff.start())
    while world.reports:
        if rng.random() < 0.05:
            world.do(handoff.give_up(rng.choice(REASONS)))
        world.report(handoff)
    assert world.issued[-1] is ActionKind.COMPLETE
    assert handoff.result is not None
    assert max(world.freed.values(), default=0) <= 1
    assert world.owns["source"] == 0
    assert world.owns["destination"] == (handoff.result == "succeeded")
