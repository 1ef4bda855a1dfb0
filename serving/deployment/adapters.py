"""Adapters: the LoRA adapters of one model's servers, as the servers show them now.

found, or looked at ──► update ──► names, of servers that answer      an adapter is a model for clients
its worker has left ──► its workers less that one, the name stays     requests for it get 503, not 404
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engines import DisaggregationMode

if TYPE_CHECKING:
    from engines.upstream import ServerFacts, Upstream


class Adapters:
    """See the module. `changed` is called after each change of the names."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self.names: tuple[str, ...] = ()
        """Names of the adapters, sorted."""
        self._changed = changed
        self._of_server: dict[str, tuple[str, ...]] = {}
        """What each server that answers was last seen to have, by URL, also while it is down."""
        self._of_worker: dict[int, tuple[str, ...]] = {}
        """What the server of each worker in service has."""

    def workers(self, name: str) -> set[int]:
        """Return the workers whose servers have the adapter."""
        return {worker_id for worker_id, names in self._of_worker.items() if name in names}

    @contextmanager
    def of(self, url: str, engine: Upstream, worker_id: int, mode: DisaggregationMode) -> Iterator[None]:
        """Follow the adapters of a worker's server during the block."""

        def update(facts: ServerFacts) -> None:
            self._of_worker[worker_id] = facts.adapters
            if mode is not DisaggregationMode.PREFILL:
                self._of_server[url] = facts.adapters
                self._rename()

        engine.on_change = update
        update(engine.known)
        try:
            yield
        finally:
            engine.on_change = None
            del self._of_worker[worker_id]

    def _rename(self) -> None:
        names = tuple(sorted({name for names in self._of_server.values() for name in names}))
        if names != self.names:
            self.names = names
            self._changed()
