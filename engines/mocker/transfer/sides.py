"""The two sides of a transfer: what a prefill and a decode worker implement, and the key by which they find each other.

One call releases the blocks of a side: the source's `release` or `cancel`, the destination's `cancel`, unless
`activate` made them the request's own. `cancel` follows one of these only where it, or the source's `release`, raised.
None of the three waits or needs the loop: they may run in the other side's task, or in a plain callback when a request
is stopped.

How long the KV blocks of a prefilled prompt are on their way to the decode worker.

Source: dynamo lib/mocker/src/common/handoff.rs, HandoffTransferTiming. Other than there, invalid numbers are
refused where the record is made, and an infinite delay where it is computed.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Protocol, get_args
from uuid import UUID

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.protocols import BootstrapInfo

from ..args import TransferTimingMode, WorkerType

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


class SourceSide(Protocol):
    """The prefill worker's part, for one request. `cancel` comes only after `submit`, and never while `hold` waits."""

    def submit(self) -> None:
        """Queue the prefill, whose blocks are kept when it is done. What it raises ends the transfer."""

    async def hold(self) -> TransferTiming:
        """Return when the prompt is computed and its blocks are held. May be cancelled; an error ends the transfer."""
        ...

    def release(self) -> None:
        """Release the blocks, which have arrived at the decode worker."""

    def cancel(self) -> None:
        """Release everything: a queued, running or held prefill, or nothing."""


class DestinationSide(Protocol):
    """The decode worker's part, for one request. `cancel` comes only after `reserve` was called and has ended."""

    async def reserve(self) -> int:
        """Wait for room for the prompt; return the number of its tokens that have to be transferred.

        May be cancelled; what it raises ends the transfer.
        """
        ...

    def activate(self) -> None:
        """Let the request decode: its blocks have arrived."""

    def cancel(self) -> None:
        """Release everything, an activated request included."""


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
