"""Transfer: one prompt's KV blocks pass from a prefill worker to a decode worker, as a pure state machine.

    source first        submit prefill ─► reserve destination ─┐
    destination first   reserve destination ─► submit prefill ─┴► start transfer ─► activate ─► release ─► complete

Each step is an action that the caller takes and acknowledges; the first three are followed by a fact. Nothing is done
here: facts and acknowledgements go in, the actions that are due come out.

Source: dynamo lib/mocker/src/common/handoff.rs, HandoffCoordinatorCore. Other than there, an action is named by its
kind, since none is ever issued twice; a fact that contradicts an earlier one is an error; a refused call changes
nothing; cleaning up ends when every cancel was acknowledged; invalid numbers of a `TransferTiming` are refused where it
is made, and an infinite delay where it is computed.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf, isfinite
from typing import Literal, get_args
from uuid import UUID

from attrs import frozen

from pipeline import ContractViolation, InvalidArgument
from pipeline.protocols import BootstrapInfo

from ..args import TransferTimingMode, WorkerType

TransferOrder = Literal["source_first", "destination_first"]
EndReason = Literal["failed", "cancelled", "timed_out"]
TransferResult = Literal["succeeded", "failed", "cancelled", "timed_out"]

_ORDER_OF_ENGINE: dict[str, TransferOrder] = {
    "vllm": "source_first",
    "trtllm": "source_first",
    "sglang": "destination_first",
}


_BYTES_PER_GB = 1e9
_MS_PER_S = 1000.0


@frozen
class TransferTiming:
    """The prefill side's figures for the transfer of one prompt.

    `mode` selects the tokens on the way: all of the prompt, or those missing at the decode side. Raises
    InvalidArgument, naming the field, for a negative number and for one that is not finite.
    """

    prompt_tokens: int
    kv_bytes_per_token: int | None = None
    bandwidth_gb_s: float | None = None
    """Decimal gigabytes a second; without a delay if None or 0."""
    mode: TransferTimingMode = "full_prompt"

    def __attrs_post_init__(self) -> None:
        _not_negative(self.prompt_tokens, "prompt_tokens")
        _not_negative(self.kv_bytes_per_token, "kv_bytes_per_token")
        _not_negative(self.bandwidth_gb_s, "bandwidth_gb_s")
        if self.mode not in get_args(TransferTimingMode):
            raise InvalidArgument(f"unknown transfer timing {self.mode!r}", field="mode")

    def delay_ms(self, missing_tokens: int) -> float | None:
        """Return the time on the way with so many tokens missing at the destination; None if it is not modelled.

        `missing_tokens` counts only in mode destination_missing and may exceed the prompt: blocks are whole. Raises
        InvalidArgument if it is negative, or if the delay is beyond any number.
        """
        _not_negative(missing_tokens, "missing_tokens")
        if self.kv_bytes_per_token is None or not self.bandwidth_gb_s:
            return None
        tokens = self.prompt_tokens if self.mode == "full_prompt" else missing_tokens
        try:
            delay_ms = tokens * self.kv_bytes_per_token / (self.bandwidth_gb_s * _BYTES_PER_GB) * _MS_PER_S
        except (OverflowError, ZeroDivisionError):
            delay_ms = inf
        if not isfinite(delay_ms):
            raise InvalidArgument(f"the transfer of {tokens} tokens would never end", field="bandwidth_gb_s")
        return delay_ms


def transfer_delay_ms(
    timing: TransferTiming, missing_tokens: int, *, worker_type: WorkerType, is_completed: bool
) -> float | None:
    """Return the delay that this worker adds to the transfer: only a prefill worker with a complete prefill adds one.

    Zero is a delay too: the step is taken. Raises as `TransferTiming.delay_ms`.
    """
    if worker_type != "prefill" or not is_completed:
        return None
    return timing.delay_ms(missing_tokens)


def _not_negative(value: float | None, name: str) -> None:
    # An integer of any length is finite, but may be too long for the float that isfinite takes.
    if value is not None and not (value >= 0 and (isinstance(value, int) or isfinite(value))):
        raise InvalidArgument(f"must be finite and not negative, got {value}", field=name)


@frozen
class TransferKey:
    """The identity of a transfer, equal on both sides. Two transfers differ in room, and in handoff id if any."""

    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
    request_id: str
    handoff_id: UUID | None = None

    @classmethod
    def of(cls, info: BootstrapInfo, request_id: str) -> TransferKey:
        """Return the key of a request from the bootstrap info of its router."""
        return cls(info.bootstrap_host, info.bootstrap_port, info.bootstrap_room, request_id, info.handoff_id)

    @property
    def places(self) -> list[tuple[str, int, int] | UUID]:
        """The names of the session, each unique to it."""
        room = (self.bootstrap_host, self.bootstrap_port, self.bootstrap_room)
        return [room] if self.handoff_id is None else [room, self.handoff_id]

    def differs_in(self, other: TransferKey) -> str | None:
        """Return the first field in which the two differ, if there is one."""
        fields = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "handoff_id", "request_id")
        return next((name for name in fields if getattr(self, name) != getattr(other, name)), None)


class ActionKind(StrEnum):
    """What the two sides may have to do; each at most once."""

    SUBMIT_PREFILL = "submit_prefill"
    RESERVE_DESTINATION = "reserve_destination"
    START_TRANSFER = "start_transfer"
    ACTIVATE_DESTINATION = "activate_destination"
    RELEASE_SOURCE = "release_source"
    CANCEL_SOURCE = "cancel_source"
    CANCEL_DESTINATION = "cancel_destination"
    COMPLETE = "complete"
    """Everything is over, well or not. Needs no acknowledgement."""


class ActionOutcome(StrEnum):
    """The outcome of an action; a cancel or release without an effect is a noop."""

    SUBMITTED = "submitted"
    ACCEPTED = "accepted"
    SCHEDULED = "scheduled"
    APPLIED = "applied"
    NOOP = "noop"
    FAILED = "failed"


class TransferFact(StrEnum):
    """What becomes true some time after an action was acknowledged."""

    SOURCE_HELD = "source_held"
    DESTINATION_RESERVED = "destination_reserved"
    TRANSFER_COMPLETED = "transfer_completed"


@frozen
class TransferAction:
    """One thing to do now; `delay_ms` is set for the start of the transfer only."""

    kind: ActionKind
    delay_ms: float | None = None


@frozen
class _Step:
    kind: ActionKind
    outcomes: tuple[ActionOutcome, ...]
    fact: TransferFact | None = None
    """What the next step waits for besides the acknowledgement."""


_SUBMIT = _Step(ActionKind.SUBMIT_PREFILL, (ActionOutcome.SUBMITTED,), TransferFact.SOURCE_HELD)
_RESERVE = _Step(ActionKind.RESERVE_DESTINATION, (ActionOutcome.ACCEPTED,), TransferFact.DESTINATION_RESERVED)
_TAIL = (
    _Step(ActionKind.START_TRANSFER, (ActionOutcome.SCHEDULED,), TransferFact.TRANSFER_COMPLETED),
    _Step(ActionKind.ACTIVATE_DESTINATION, (ActionOutcome.APPLIED,)),
    _Step(ActionKind.RELEASE_SOURCE, (ActionOutcome.APPLIED, ActionOutcome.NOOP)),
)
_STEPS: dict[TransferOrder, tuple[_Step, ...]] = {
    "source_first": (_SUBMIT, _RESERVE, *_TAIL),
    "destination_first": (_RESERVE, _SUBMIT, *_TAIL),
}
_CANCELS = {
    ActionKind.SUBMIT_PREFILL: ActionKind.CANCEL_SOURCE,
    ActionKind.RESERVE_DESTINATION: ActionKind.CANCEL_DESTINATION,
}
"""What takes back the step by which a side may have come to own blocks."""
_CANCELLED = (ActionOutcome.APPLIED, ActionOutcome.NOOP)
_OUTCOMES = {step.kind: step.outcomes for step in _STEPS["source_first"]} | dict.fromkeys(_CANCELS.values(), _CANCELLED)


def transfer_order(engine_type: str) -> TransferOrder:
    """Return which side goes first with this engine. Raises InvalidArgument for an unknown engine."""
    if engine_type not in _ORDER_OF_ENGINE:
        known = ", ".join(_ORDER_OF_ENGINE)
        raise InvalidArgument(f"unknown engine type {engine_type!r}: expected one of {known}", field="engine_type")
    return _ORDER_OF_ENGINE[engine_type]


class Transfer:
    """One transfer from `start` to `COMPLETE`. Rules, named by the ContractViolation that a breach raises:

    H1  A fact comes after the acknowledgement of its action, and in the order of the steps.
    H2  A fact or outcome may be repeated (that is ignored), never contradicted.
    H3  Only an issued action is acknowledged, and with an outcome it can have.
    H4  A cancel does not fail: until it was applied, or was a noop, the transfer does not end.

    Giving up cancels every side that may own blocks: an action that was issued counts, acknowledged or not. From then
    on late facts are ignored and late acknowledgements of steps lead to nothing. A call that raises changes nothing.
    """

    def __init__(self, order: TransferOrder) -> None:
        if order not in _STEPS:
            raise InvalidArgument(f"unknown order {order!r}: expected one of {', '.join(_STEPS)}", field="order")
        self.order: TransferOrder = order
        self.result: TransferResult | None = None
        """Set with COMPLETE."""
        self._reason: EndReason | None = None
        self._at = -1  # the step that was issued last
        self._outcomes: dict[ActionKind, ActionOutcome | None] = {}  # of what was issued; None: not acknowledged
        self._facts: dict[TransferFact, TransferTiming | int | None] = {}

    @property
    def is_ending(self) -> bool:
        """True once given up or complete: no further step is taken."""
        return self._reason is not None or self.result is not None

    @property
    def is_transferring(self) -> bool:
        """True while blocks are on their way."""
        begun = self._outcomes.get(ActionKind.START_TRANSFER) is ActionOutcome.SCHEDULED
        return begun and not self.is_ending and TransferFact.TRANSFER_COMPLETED not in self._facts

    def has(self, fact: TransferFact) -> bool:
        """Return whether the fact was reported."""
        return fact in self._facts

    def start(self) -> list[TransferAction]:
        """Return the first action; none if started or given up already."""
        if self._at >= 0 or self.is_ending:
            return []
        return self._advance()

    def source_held(self, timing: TransferTiming) -> list[TransferAction]:
        """Report that the prefill is done and its blocks are held. Raises InvalidArgument for an infinite delay."""
        return self._on_fact(TransferFact.SOURCE_HELD, timing)

    def destination_reserved(self, missing_tokens: int) -> list[TransferAction]:
        """Report room at the decode side, which lacks that many tokens. Raises as `TransferTiming.delay_ms`."""
        if missing_tokens < 0:
            raise InvalidArgument(f"must not be negative, got {missing_tokens}", field="missing_tokens")
        return self._on_fact(TransferFact.DESTINATION_RESERVED, missing_tokens)

    def transfer_completed(self) -> list[TransferAction]:
        return self._on_fact(TransferFact.TRANSFER_COMPLETED, None)

    def give_up(self, reason: EndReason) -> list[TransferAction]:
        """End early: cancel the sides that may own blocks. Ignored once given up or complete."""
        if self.is_ending:
            return []
        self._reason = reason
        cancels = [cancel for step, cancel in _CANCELS.items() if step in self._outcomes]
        return [self._issue(cancel) for cancel in cancels] or self._complete()

    def acknowledge(self, kind: ActionKind, outcome: ActionOutcome) -> list[TransferAction]:
        """Take the outcome of an issued action; a failed step gives the transfer up."""
        if kind not in self._outcomes:
            raise ContractViolation(f"{kind} was acknowledged but never issued", rule="H3")
        before = self._outcomes[kind]
        if before is outcome:
            return []
        if before is not None:
            raise ContractViolation(f"{kind} was {before} and cannot become {outcome}", rule="H2")
        if outcome is ActionOutcome.FAILED and kind in _CANCELS.values():
            raise ContractViolation(f"{kind} failed, so blocks may still be held", rule="H4")
        if outcome is not ActionOutcome.FAILED and outcome not in _OUTCOMES[kind]:
            raise ContractViolation(f"{outcome} is no outcome of {kind}", rule="H3")
        self._outcomes[kind] = outcome
        if self.is_ending:
            issued = [cancel for cancel in _CANCELS.values() if cancel in self._outcomes]
            is_clean = self.result is None and all(self._outcomes[cancel] is not None for cancel in issued)
            return self._complete() if is_clean else []
        if outcome is ActionOutcome.FAILED:
            return self.give_up("failed")
        return [] if self._steps[self._at].fact else self._advance()

    @property
    def _steps(self) -> tuple[_Step, ...]:
        return _STEPS[self.order]

    def _on_fact(self, fact: TransferFact, value: TransferTiming | int | None) -> list[TransferAction]:
        if fact in self._facts:
            if self._facts[fact] != value:
                raise ContractViolation(f"{fact} was reported with {self._facts[fact]}, now with {value}", rule="H2")
            return []
        if self.is_ending:
            return []
        step = self._steps[self._at] if self._at >= 0 else None
        if step is None or step.fact is not fact or self._outcomes[step.kind] is None:
            raise ContractViolation(f"{fact} comes before its action was acknowledged", rule="H1")
        self._facts[fact] = value
        try:
            return self._advance()
        except InvalidArgument:
            del self._facts[fact]
            raise

    def _advance(self) -> list[TransferAction]:
        if self._at + 1 == len(self._steps):
            return self._complete()
        kind = self._steps[self._at + 1].kind
        action = self._issue(kind, self._delay_ms() if kind is ActionKind.START_TRANSFER else None)
        self._at += 1
        return [action]

    def _delay_ms(self) -> float:
        timing, missing = self._facts[TransferFact.SOURCE_HELD], self._facts[TransferFact.DESTINATION_RESERVED]
        assert isinstance(timing, TransferTiming)
        assert isinstance(missing, int)
        return timing.delay_ms(missing) or 0.0

    def _issue(self, kind: ActionKind, delay_ms: float | None = None) -> TransferAction:
        self._outcomes[kind] = None
        return TransferAction(kind, delay_ms)

    def _complete(self) -> list[TransferAction]:
        self.result = self._reason or "succeeded"
        self._outcomes[ActionKind.COMPLETE] = ActionOutcome.APPLIED
        return [TransferAction(ActionKind.COMPLETE)]
