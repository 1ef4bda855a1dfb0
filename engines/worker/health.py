"""SystemHealth: whether this process is ready, from what its endpoints say.

| what there is                  | the process is healthy when     |
|--------------------------------|---------------------------------|
| a list of required endpoints   | all of them are ready           |
| else any health-check target   | all targets are ready           |
| else                           | it was itself said to be ready  |

An endpoint without a health payload is no target: it is ready itself and makes the process neither healthy nor not.

Source: dynamo lib/runtime/src/system_health.rs.

WorkerHealth: one worker in the health of its process, and the canary that may watch it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pipeline import Annotated, AsyncEngine
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.settings import Variable, choice

from .lifecycle import Work
from .probe import IdleProbe, IdleProbeSettings, ProbeEngine, TrafficObserver

if TYPE_CHECKING:
    from ..adapter import RequestAdapter


_log = logging.getLogger(__name__)

STARTING_HEALTH = Variable(
    "DYN_SYSTEM_STARTING_HEALTH_STATUS",
    False,
    "Whether a process is ready from its start: ready or notready.",
    lambda text: choice("ready", "notready")(text.lower()) == "ready",
)


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
        return cls(process_ready=STARTING_HEALTH.of(environment))

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


TokenEngine = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]


class WorkerHealth:
    """Listed from `watched` to `forget`, as not ready at first.

    Where the name is listed already it is another worker's, and nothing is said of it.
    """

    def __init__(self, health: SystemHealth, name: str) -> None:
        self._health, self._name = health, name
        self._is_listed = False
        self._canary: IdleProbe | None = None
        self._end_canary: Callable[[], None] = lambda: None

    def watched(
        self, adapter: RequestAdapter, payload: Mapping[str, Any] | None, settings: IdleProbeSettings
    ) -> TokenEngine:
        """What is to be served in the adapter's place. To be called before: the very first request counts."""
        engine: TokenEngine = adapter
        if payload is not None and settings.is_enabled:
            self._canary = IdleProbe(ProbeEngine(adapter), payload, settings, self._say)
            engine = TrafficObserver(adapter, self._canary)
        self._is_listed = self._health.register(self._name, is_target=payload is not None, is_probed=True)
        return engine

    def begin(self, spawn: Callable[[Work], Callable[[], None]]) -> None:
        """It can be reached: ready, or to be probed."""
        if self._canary is None:
            self._say(True)
        else:
            self._end_canary = spawn(self._canary.run)

    def end(self) -> None:
        """Not ready from now on, whatever a canary still hears."""
        if self._canary is not None:
            self._canary.stop()
        self._end_canary()
        self._say(False)

    def forget(self) -> None:
        """For a worker that is gone."""
        if self._is_listed:
            self._health.forget(self._name)

    def _say(self, is_ready: bool) -> None:
        if self._is_listed:
            self._health.set_ready(self._name, is_ready)
