"""Transfer: which action follows which fact; a failure cancels every side that may own blocks."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from random import Random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.mocker.args import WorkerType
from engines.mocker.transfer.protocol import (
    ActionKind,
    ActionOutcome,
    EndReason,
    Transfer,
    TransferAction,
    TransferFact,
    TransferOrder,
    TransferTiming,
    transfer_delay_ms,
    transfer_order,
)
from pipeline import ContractViolation, InvalidArgument

ORDERS = get_args(TransferOrder)
REASONS = get_args(EndReason)
CANCELS = (ActionKind.CANCEL_SOURCE, ActionKind.CANCEL_DESTINATION)

NOT_MODELLED = TransferTiming(128)
MISSING_ONLY = TransferTiming(128, 1_000_000, 1.0, "destination_missing")

OUTCOMES = {
    ActionKind.SUBMIT_PREFILL: ActionOutcome.SUBMITTED,
    ActionKind.RESERVE_DESTINATION: ActionOutcome.ACCEPTED,
    ActionKind.START_TRANSFER: ActionOutcome.SCHEDULED,
}
"""What a driver reports of each action; by default, that it was applied."""
FACTS = {
    ActionKind.SUBMIT_PREFILL: TransferFact.SOURCE_HELD,
    ActionKind.RESERVE_DESTINATION: TransferFact.DESTINATION_RESERVED,
    ActionKind.START_TRANSFER: TransferFact.TRANSFER_COMPLETED,
}
TAIL = ["start_transfer", "activate_destination", "release_source", "complete"]
SEQUENCE = {
    "source_first": ["submit_prefill", "reserve_destination", *TAIL],
    "destination_first": ["reserve_destination", "submit_prefill", *TAIL],
}


def acknowledge(transfer: Transfer, action: TransferAction) -> list[TransferAction]:
    return transfer.acknowledge(action.kind, OUTCOMES.get(action.kind, ActionOutcome.APPLIED))


def report_fact(
    transfer: Transfer, fact: TransferFact, timing: TransferTiming = NOT_MODELLED, missing: int = 0
) -> list[TransferAction]:
    if fact is TransferFact.SOURCE_HELD:
        return transfer.source_held(timing)
    if fact is TransferFact.DESTINATION_RESERVED:
        return transfer.destination_reserved(missing)
    return transfer.transfer_completed()


def follow(
    transfer: Transfer, action: TransferAction, timing: TransferTiming = NOT_MODELLED, missing: int = 0
) -> list[TransferAction]:
    """Acknowledge the action and report its fact; return the actions that are due next."""
    due = acknowledge(transfer, action)
    return due + report_fact(transfer, FACTS[action.kind], timing, missing) if action.kind in FACTS else due


def drive_to(transfer: Transfer, kind: ActionKind, timing: TransferTiming = NOT_MODELLED, missing: int = 0) -> Any:
    """Run the transfer without failure until that action is due, and return it."""
    (action,) = transfer.start()
    while action.kind is not kind:
        (action,) = follow(transfer, action, timing, missing)
    return action


def kinds(actions: list[TransferAction]) -> list[str]:
    return [action.kind.value for action in actions]


@pytest.mark.parametrize("order", ORDERS)
def test_a_handoff_that_goes_well_takes_each_step_once_in_order(order: TransferOrder) -> None:
    transfer = Transfer(order)
    taken = due = transfer.start()
    while due[0].kind is not ActionKind.COMPLETE:
        assert transfer.result is None
        due = follow(transfer, due[0])
        taken = taken + due
    assert kinds(taken) == SEQUENCE[order]
    assert transfer.result == "succeeded"
    assert transfer.is_ending


def test_each_engine_has_its_order() -> None:
    assert [transfer_order(engine) for engine in ("vllm", "trtllm", "sglang")] == [ORDERS[0], ORDERS[0], ORDERS[1]]
    with pytest.raises(InvalidArgument, match="vllm, trtllm, sglang") as raised:
        transfer_order("tgi")
    assert raised.value.field == "engine_type"


def test_an_unknown_order_is_refused() -> None:
    order: Any = "both_first"
    with pytest.raises(InvalidArgument, match="source_first, destination_first"):
        Transfer(order)


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
    order: TransferOrder, timing: TransferTiming, missing_tokens: int, delay_ms: float
) -> None:
    """In the third row the destination has every block already."""
    transfer = Transfer(order)
    start = drive_to(transfer, ActionKind.START_TRANSFER, timing, missing_tokens)
    assert start == TransferAction(ActionKind.START_TRANSFER, delay_ms)
    assert kinds(follow(transfer, start)) == ["activate_destination"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("is_acknowledged", [False, True])
@pytest.mark.parametrize("kind", [step for step in ActionKind if step.value in SEQUENCE["source_first"][:-1]])
def test_giving_up_cancels_every_side_that_may_own_blocks(
    order: TransferOrder, reason: EndReason, is_acknowledged: bool, kind: ActionKind
) -> None:
    """An issued transfer counts as owned, acknowledged or not."""
    transfer = Transfer(order)
    action = drive_to(transfer, kind)
    if is_acknowledged and kind in FACTS:
        assert acknowledge(transfer, action) == []
    issued = SEQUENCE[order][: SEQUENCE[order].index(kind.value) + 1]
    expected = [
        cancel
        for step, cancel in (("submit_prefill", CANCELS[0]), ("reserve_destination", CANCELS[1]))
        if step in issued
    ]
    cancels = transfer.give_up(reason)
    assert [cancel.kind for cancel in cancels] == expected
    ends = [transfer.acknowledge(cancel.kind, ActionOutcome.NOOP) for cancel in cancels]
    assert [kinds(end) for end in ends] == [[]] * (len(ends) - 1) + [["complete"]]
    assert transfer.result == reason


@pytest.mark.parametrize("order", ORDERS)
def test_a_lost_release_is_followed_by_cancels_and_no_second_release(order: TransferOrder) -> None:
    transfer = Transfer(order)
    release = drive_to(transfer, ActionKind.RELEASE_SOURCE)
    cancels = transfer.give_up("timed_out")
    assert [cancel.kind for cancel in cancels] == list(CANCELS)
    late = acknowledge(transfer, release)
    assert late == []
    assert acknowledge(transfer, cancels[0]) == []
    assert kinds(acknowledge(transfer, cancels[1])) == ["complete"]
    assert transfer.result == "timed_out"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [step for step in ActionKind if step.value in SEQUENCE["source_first"][:-1]])
def test_a_failed_step_gives_up_and_its_own_side_is_cancelled_too(order: TransferOrder, kind: ActionKind) -> None:
    transfer = Transfer(order)
    drive_to(transfer, kind)
    cancels = kinds(transfer.acknowledge(kind, ActionOutcome.FAILED))
    own = "cancel_destination" if "destination" in kind.value else "cancel_source"
    assert own in cancels
    assert transfer.is_ending
    assert transfer.result is None


def test_what_is_given_up_before_its_start_never_starts() -> None:
    transfer = Transfer("source_first")
    assert kinds(transfer.give_up("cancelled")) == ["complete"]
    assert transfer.start() == []
    assert transfer.result == "cancelled"


@pytest.mark.parametrize("order", ORDERS)
def test_a_repeated_report_is_ignored(order: TransferOrder) -> None:
    transfer = Transfer(order)
    (action,) = transfer.start()
    assert transfer.start() == []
    while action.kind is not ActionKind.COMPLETE:
        before = action
        (action,) = follow(transfer, before)
        assert acknowledge(transfer, before) == []
        if before.kind in FACTS:
            assert report_fact(transfer, FACTS[before.kind]) == []
    assert acknowledge(transfer, action) == []
    assert transfer.give_up("timed_out") == []
    assert transfer.result == "succeeded"


def test_giving_up_twice_keeps_the_first_reason() -> None:
    transfer = Transfer("source_first")
    transfer.start()
    (cancel,) = transfer.give_up("failed")
    assert transfer.give_up("timed_out") == []
    assert kinds(acknowledge(transfer, cancel)) == ["complete"]
    assert transfer.result == "failed"


def breach(rule: str) -> Any:
    return pytest.raises(ContractViolation, check=lambda error: error.rule == rule)


@pytest.mark.parametrize("order", ORDERS)
def test_h1_a_fact_before_its_acknowledged_action_is_an_error(order: TransferOrder) -> None:
    transfer = Transfer(order)
    for fact in TransferFact:
        with breach("H1"):
            report_fact(transfer, fact)
    (action,) = transfer.start()
    while action.kind in FACTS:
        for fact in TransferFact:
            if not transfer.has(fact):
                with breach("H1"):
                    report_fact(transfer, fact)
        (action,) = follow(transfer, action)


def test_h2_an_acknowledgement_that_contradicts_the_first_is_an_error() -> None:
    transfer = Transfer("source_first")
    drive_to(transfer, ActionKind.START_TRANSFER)
    with breach("H2"):
        transfer.acknowledge(ActionKind.SUBMIT_PREFILL, ActionOutcome.FAILED)
    assert not transfer.is_ending


def test_h2_a_fact_that_contradicts_the_first_is_an_error() -> None:
    transfer = Transfer("source_first")
    drive_to(transfer, ActionKind.ACTIVATE_DESTINATION, MISSING_ONLY, 5)
    with breach("H2"):
        transfer.destination_reserved(6)
    with breach("H2"):
        transfer.source_held(NOT_MODELLED)


def test_h3_only_an_issued_action_is_acknowledged_and_only_as_it_can_go() -> None:
    transfer = Transfer("source_first")
    (submit,) = transfer.start()
    for kind in set(ActionKind) - {submit.kind}:
        with breach("H3"):
            transfer.acknowledge(kind, ActionOutcome.APPLIED)
    for outcome in set(ActionOutcome) - {ActionOutcome.SUBMITTED, ActionOutcome.FAILED}:
        with breach("H3"):
            transfer.acknowledge(submit.kind, outcome)
    assert acknowledge(transfer, submit) == []  # the refused report left no trace


def test_h4_a_cancel_that_failed_does_not_end_it() -> None:
    transfer = Transfer("source_first")
    transfer.start()
    (cancel,) = transfer.give_up("cancelled")
    with breach("H4"):
        transfer.acknowledge(cancel.kind, ActionOutcome.FAILED)
    assert transfer.result is None
    assert kinds(acknowledge(transfer, cancel)) == ["complete"]


def test_late_reports_of_steps_lead_to_nothing() -> None:
    transfer = Transfer("source_first")
    (submit,) = transfer.start()
    (cancel,) = transfer.give_up("cancelled")
    assert acknowledge(transfer, submit) == []
    assert transfer.source_held(NOT_MODELLED) == []
    assert kinds(acknowledge(transfer, cancel)) == ["complete"]
    assert transfer.source_held(NOT_MODELLED) == []


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
        ("missing_tokens", lambda: Transfer("source_first").destination_reserved(-1)),
    ]
    for name, make in refused:
        with pytest.raises(InvalidArgument) as raised:
            make()
        assert raised.value.field == name


@pytest.mark.parametrize("order", ORDERS)
def test_a_delay_without_end_is_refused_before_the_transfer_and_leaves_no_trace(order: TransferOrder) -> None:
    transfer, endless = Transfer(order), TransferTiming(1, 10**300, 1e-20)
    (first,) = transfer.start()
    (second,) = follow(transfer, first, endless)
    assert acknowledge(transfer, second) == []
    with pytest.raises(InvalidArgument) as raised:
        report_fact(transfer, FACTS[second.kind], endless)
    assert raised.value.field == "bandwidth_gb_s"
    assert not transfer.has(FACTS[second.kind])
    assert [cancel.kind for cancel in transfer.give_up("failed")] == list(CANCELS)


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
    timing = TransferTiming(128, 1_000_000, 1.0)
    assert transfer_delay_ms(timing, 0, worker_type=worker_type, is_completed=is_completed) == delay_ms


@pytest.mark.parametrize("timing", [TransferTiming(8, None, 1.0), TransferTiming(8, 4), TransferTiming(8, 4, 0.0)])
def test_without_bytes_or_bandwidth_no_delay_is_modelled(timing: TransferTiming) -> None:
    assert timing.delay_ms(8) is None


class World:
    """Two sides whose reports reach the transfer late, repeated, and one in ten as a failed step."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.owns, self.freed = Counter[str](), Counter[str]()
        self.issued: list[ActionKind] = []
        self.reports: list[tuple[Any, ActionOutcome]] = []

    def do(self, actions: list[TransferAction]) -> None:
        for action in actions:
            assert ActionKind.COMPLETE not in self.issued
            assert action.kind not in self.issued
            self.issued.append(action.kind)
            if action.kind is not ActionKind.COMPLETE:
                self.reports.append((action.kind, self.outcome(action.kind)))

    def outcome(self, kind: ActionKind) -> ActionOutcome:
        """Return the outcome of the action. A step that fails may have got its blocks all the same."""
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

    def report(self, transfer: Transfer) -> None:
        kind, outcome = self.reports.pop(self.rng.randrange(len(self.reports)))
        if isinstance(kind, TransferFact):
            self.do(report_fact(transfer, kind, MISSING_ONLY, 3))
            return
        self.do(transfer.acknowledge(kind, outcome))
        if kind in FACTS and outcome is not ActionOutcome.FAILED:
            self.reports.append((FACTS[kind], outcome))
        if self.rng.random() < 0.2:
            self.reports.append((kind, outcome))


@given(st.sampled_from(ORDERS), st.integers(0, 2**32))
def test_in_any_order_of_reports_each_side_is_freed_once_and_the_end_comes_last(
    order: TransferOrder, seed: int
) -> None:
    rng, transfer = Random(seed), Transfer(order)
    world = World(rng)
    world.do(transfer.start())
    while world.reports:
        if rng.random() < 0.05:
            world.do(transfer.give_up(rng.choice(REASONS)))
        world.report(transfer)
    assert world.issued[-1] is ActionKind.COMPLETE
    assert transfer.result is not None
    assert max(world.freed.values(), default=0) <= 1
    assert world.owns["source"] == 0
    assert world.owns["destination"] == (transfer.result == "succeeded")
