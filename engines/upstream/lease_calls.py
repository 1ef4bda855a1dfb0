"""The rest of a lease that a prefill worker of another process has given: that worker knows it.

prefill   its leases, at an address among its peers ──► in the opaque parameters
decode    limit_lease ──► request plane ──► the seconds that are left there
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
from attrs import frozen

from pipeline import AsyncEngine, Context, Control, PenstockError, function_engine
from pipeline.errors import TransferFailed

from ..peers import Peers
from .leases import Lease, Leases

_CALL_S = 2.0
"""Longest wait for the prefill worker."""


@frozen
class LeaseCall:
    """A call for the rest of a lease."""

    lease_id: str


@frozen
class LeaseRest:
    """What is left of it."""

    left_s: float
    """Seconds; 0 if it is over, or not known any more."""


def lease_engine(leases: Leases) -> AsyncEngine[LeaseCall, LeaseRest]:
    """Return an engine that answers with the rest of a lease, for the peers of a prefill worker."""

    async def rest(call: LeaseCall) -> AsyncIterator[LeaseRest]:
        yield LeaseRest(leases.left_s(call.lease_id))

    return function_engine(rest)


async def limit_lease(lease: Lease, written: Any, leases: Leases, peers: Peers | None, control: Control) -> None:
    """End a lease when it ends at the prefill worker of another process that has given it.

    Nothing happens to leases of this process, which are exact, nor to those without an address, as of workers without
    peers. Raise WorkerOverloaded if it is over, and TransferFailed if the prefill worker cannot be reached. A stop ends
    the wait.
    """
    address = written.get("address") if isinstance(written, Mapping) and not leases.has_given(written) else None
    if peers is None or not isinstance(address, str) or not address:
        return
    begun_s = anyio.current_time()
    with anyio.CancelScope() as waiting:
        forget = control.on_stop(waiting.cancel)
        try:
            left_s = await _asked(peers, address, lease.id)
        finally:
            forget()
        lease.ends_s = min(lease.ends_s, begun_s + left_s)
        lease.check()


async def _asked(peers: Peers, address: str, lease_id: str) -> float:
    try:
        with anyio.fail_after(_CALL_S):
            peer = await peers.engine(address, LeaseRest)
            async with await peer.generate(Context(LeaseCall(lease_id))) as stream:
                (rest,) = await stream.collect()
                return rest.left_s
    except (PenstockError, TimeoutError, ValueError) as error:
        text = f"it is not known how long the prefill server keeps the prompt's KV blocks: {error}"
        raise TransferFailed(text, cause=error) from error
