"""Leases: how long a prefill server keeps the KV blocks of a prompt for the server that will answer it.

    offer ──► begin ─┬─ taken in time ──► first token ──► done
                     └─ not taken ──────► over, by itself: the blocks may hold another prompt from here on

A server that reads blocks after their lease gets no error, and answers wrongly. So a lease counts as over a sixth of
its time before the server frees the blocks: it began there before its answer was here.

Source: vllm/distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py, kv_lease_duration.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any
from uuid import uuid4

import anyio
from attrs import define, field

from pipeline import InvalidArgument, WorkerOverloaded

_MARGIN = 1 / 6
"""Share of a lease in which nothing is begun any more. It is also how often vLLM renews one."""


@define(eq=False)
class Lease:
    """The time in which the blocks of one prompt can be fetched. Made by `Leases`."""

    id: str
    ends_s: float
    """When it is over, on the clock of the loop; infinity: something else ends it."""

    @property
    def is_over(self) -> bool:
        return anyio.current_time() >= self.ends_s

    def check(self) -> None:
        """Raise WorkerOverloaded if it is over: the request waited too long for its decode, and is to start again."""
        if self.is_over:
            raise WorkerOverloaded("decode came too late: the prefill server does not keep the prompt's KV blocks")


@define(eq=False)
class Leases:
    """The leases that this process has given and still waits for. They end by themselves; there is nothing to close."""

    duration_s: float
    """How long the server keeps the blocks of each; infinity: for good."""
    issuer: str = field(factory=lambda: uuid4().hex, init=False)
    """Written into each lease, so that one that is over is not taken for the lease of another process."""
    _open: dict[str, Lease] = field(factory=dict, init=False)
    """By id, in the order of their ends."""

    def __len__(self) -> int:
        """Return how many are neither done nor over."""
        self._forget_ended()
        return len(self._open)

    def begin(self, lease_id: str, address: str = "") -> dict[str, Any]:
        """Begin a lease; return what `find` reads, as plain values. Raise InvalidArgument for an id that is in use.

        `address`: where other processes reach the worker that gives it; empty: nowhere.
        """
        self._forget_ended()
        if lease_id in self._open:
            raise InvalidArgument(f"transfer {lease_id!r} has begun already", field="transfer_id")
        self._open[lease_id] = _begun(lease_id, self.duration_s)
        written = {"id": lease_id, "issuer": self.issuer, "duration_s": self.duration_s}
        return written | {"address": address} if address else written

    def has_given(self, written: Mapping[str, Any]) -> bool:
        """Return whether `begin` of this process has written it."""
        return written.get("issuer") == self.issuer

    def left_s(self, lease_id: str) -> float:
        """Return the seconds until the end of a lease; 0 if it is over, done or unknown."""
        lease = self._open.get(lease_id)
        return 0.0 if lease is None else max(lease.ends_s - anyio.current_time(), 0.0)

    def find(self, written: Any) -> Lease:
        """Return the lease that `begin` has written.

        One of another process, where the time that has passed is not known here, begins with this call, as does one
        that is not written in a form known here; see `limit_lease`.
        """
        self._forget_ended()
        if not isinstance(written, Mapping) or not isinstance(lease_id := written.get("id"), str):
            return _begun("", self.duration_s)
        if self.has_given(written):
            return self._open.get(lease_id) or Lease(lease_id, -inf)
        own_s = written.get("duration_s")
        if isinstance(own_s, int | float) and own_s > 0:  # not so if it is not a number
            return _begun(lease_id, own_s)
        return _begun(lease_id, self.duration_s)

    def done(self, lease: Lease) -> None:
        """Forget a lease: the blocks have been fetched, or will not be. Nothing happens the second time."""
        if self._open.get(lease.id) is lease:
            del self._open[lease.id]

    def _forget_ended(self) -> None:
        while self._open and (oldest := next(iter(self._open.values()))).is_over:
            del self._open[oldest.id]


def _begun(lease_id: str, duration_s: float) -> Lease:
    return Lease(lease_id, anyio.current_time() + duration_s * (1 - _MARGIN))
