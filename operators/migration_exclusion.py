"""Which instances a request that moves on must not come back to; for whoever sends requests to instances.

A payload without a MigrationState, or of another kind altogether, leaves nobody out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline import Unavailable, WorkerOverloaded
from pipeline.errors import Refused, may_migrate
from pipeline.protocols import MigrationState, TraceLink

from .availability import AllBusy


def note_failure(payload: Any, instance_id: int, error: Exception, link: TraceLink | None = None) -> None:
    """Takes note that the instance failed the request, if the request may go on elsewhere after such an error."""
    state = getattr(payload, "migration_state", None)
    if isinstance(state, MigrationState) and may_migrate(error):
        state.exclude(instance_id, error, link)


def without_failed(ids: Sequence[int], payload: Any) -> Sequence[int]:
    """Those of the instances that have not failed this request."""
    state = getattr(payload, "migration_state", None)
    if not isinstance(state, MigrationState) or not state.excluded_worker_ids:
        return ids
    return [instance_id for instance_id in ids if instance_id not in state.excluded_worker_ids]


def all_failed(name: str, payload: Any) -> Refused:
    """The error where every instance that is free has failed this request: AllBusy if the last one was too busy."""
    state = payload.migration_state
    failed = ", ".join(map(str, state.excluded_worker_ids))
    message = f"no instances left for endpoint {name}: this request has failed on {failed}"
    return AllBusy(message) if isinstance(state.last_error, WorkerOverloaded) else Unavailable(message)
