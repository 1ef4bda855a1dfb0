"""SystemHealth: whether this process is ready, from what its endpoints say.

| what there is                  | the process is healthy when     |
|--------------------------------|---------------------------------|
| a list of required endpoints   | all of them are ready           |
| else any health-check target   | all targets are ready           |
| else                           | it was itself said to be ready  |

An endpoint without a health payload is no target: it is ready itself and makes the process neither healthy nor not.

Source: dynamo lib/runtime/src/system_health.rs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self

_log = logging.getLogger(__name__)

STARTING_HEALTH_ENV = "DYN_SYSTEM_STARTING_HEALTH_STATUS"


def is_healthy(
    ready: Mapping[str, bool], targets: Collection[str], required: Sequence[str], process_ready: bool
) -> bool:
    """The table above; an endpoint nobody has heard of is not ready."""
    if counted := required or targets:
        return all(ready.get(name, False) for name in counted)
    return process_ready


class SystemHealth:
    """Endpoints by name, which of them are targets, and who listens. For one thread."""

    def __init__(self, *, process_ready: bool = False, required: Sequence[str] = ()) -> None:
        self._process_ready = process_ready
        self._required = tuple(required)
        self._ready: dict[str, bool] = {}
        self._targets: set[str] = set()
        self._listeners: dict[object, Callable[[bool], object]] = {}
        self._last = self.is_healthy

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Not ready at first, unless the environment says `ready`."""
        return cls(process_ready=environment.get(STARTING_HEALTH_ENV, "").strip().lower() == "ready")

    @property
    def is_healthy(self) -> bool:
        return is_healthy(self._ready, self._targets, self._required, self._process_ready)

    @property
    def endpoints(self) -> dict[str, bool]:
        """Every endpoint there is, and whether it is ready."""
        return dict(self._ready)

    def register(self, name: str, *, is_target: bool = False, is_probed: bool = False) -> bool:
        """Adds an endpoint, ready at once unless a canary is to say so. One that is there stays as it is: False."""
        if name in self._ready:
            return False
        self._ready[name] = not is_probed
        if is_target:
            self._targets.add(name)
        self._tell()
        return True

    def set_ready(self, name: str, is_ready: bool) -> None:
        """What is known of an endpoint now; one that is not there is passed over."""
        if name in self._ready:
            self._ready[name] = is_ready
            self._tell()

    def set_process_ready(self, is_ready: bool) -> None:
        """What counts where there is no target."""
        self._process_ready = is_ready
        self._tell()

    def forget(self, name: str) -> None:
        """For an endpoint that is gone."""
        self._ready.pop(name, None)
        self._targets.discard(name)
        self._tell()

    def on_change(self, callback: Callable[[bool], object]) -> Callable[[], None]:
        """Calls back whenever `is_healthy` changes; returns what takes the callback back. It must not wait."""
        key = object()
        self._listeners[key] = callback

        def forget() -> None:
            self._listeners.pop(key, None)

        return forget

    def _tell(self) -> None:
        now = self.is_healthy
        if now is self._last:
            return
        self._last = now
        for callback in list(self._listeners.values()):
            try:
                callback(now)
            except Exception:
                _log.exception("a health callback failed")
