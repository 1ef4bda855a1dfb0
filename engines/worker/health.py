"""SystemHealth: whether this process is ready, derived from its endpoints.

| what there is                  | the process is healthy when     |
|--------------------------------|---------------------------------|
| a list of required endpoints   | all of them are ready           |
| else any health-check target   | all targets are ready           |
| else                           | it was set ready itself         |

An endpoint without a health payload is not a target: it is ready itself, and without effect on the process.

Source: dynamo lib/runtime/src/system_health.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from pipeline import Annotated, AsyncEngine
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.settings import Variable, choice

from .lifecycle import Work
from .probe import IdleProbe, IdleProbeSettings, ProbeEngine, TrafficObserver

if TYPE_CHECKING:
    from ..adapter import RequestAdapter


STARTING_HEALTH = Variable(
    "DYN_SYSTEM_STARTING_HEALTH_STATUS",
    False,
    "Whether a process is ready from its start: ready or notready.",
    lambda text: choice("ready", "notready")(text.lower()) == "ready",
)


def is_healthy(
    ready: Mapping[str, bool], targets: Collection[str], required: Sequence[str], process_ready: bool
) -> bool:
    """Return the result of the table above; an unknown endpoint is not ready."""
    if counted := required or targets:
        return all(ready.get(name, False) for name in counted)
    return process_ready


class SystemHealth:
    """Endpoints by name, with their targets. For one thread."""

    def __init__(self, *, process_ready: bool = False, required: Sequence[str] = ()) -> None:
        self._process_ready = process_ready
        self._required = tuple(required)
        self._ready: dict[str, bool] = {}
        self._targets: set[str] = set()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Return a health that is not ready at first, unless the environment sets it so."""
        return cls(process_ready=STARTING_HEALTH.of(environment))

    @property
    def is_healthy(self) -> bool:
        return is_healthy(self._ready, self._targets, self._required, self._process_ready)

    @property
    def endpoints(self) -> dict[str, bool]:
        """Whether each endpoint is ready, by name."""
        return dict(self._ready)

    def register(self, name: str, *, is_target: bool = False, is_probed: bool = False) -> bool:
        """Add an endpoint, ready at once unless it is probed. Return False, and change nothing, if it exists."""
        if name in self._ready:
            return False
        self._ready[name] = not is_probed
        if is_target:
            self._targets.add(name)
        return True

    def set_ready(self, name: str, is_ready: bool) -> None:
        """Set whether an endpoint is ready; an unknown one is ignored."""
        if name in self._ready:
            self._ready[name] = is_ready

    def set_process_ready(self, is_ready: bool) -> None:
        """Set whether the process is ready, which counts without targets."""
        self._process_ready = is_ready

    def forget(self, name: str) -> None:
        """Remove an endpoint."""
        self._ready.pop(name, None)
        self._targets.discard(name)


TokenEngine = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]


class WorkerHealth:
    """One worker's endpoint in a SystemHealth, with its idle probe if any; from `watched` to `forget`, first not ready.

    A name that is listed already is another worker's, and is left alone.
    """

    def __init__(self, health: SystemHealth, name: str) -> None:
        self._health, self._name = health, name
        self._is_listed = False
        self._probe: IdleProbe | None = None
        self._end_probe: Callable[[], None] = lambda: None

    def watched(
        self, adapter: RequestAdapter, payload: Mapping[str, Any] | None, settings: IdleProbeSettings
    ) -> TokenEngine:
        """Return the engine to serve in the adapter's place. Call it before serving: the very first request counts."""
        engine: TokenEngine = adapter
        if payload is not None and settings.is_enabled:
            self._probe = IdleProbe(ProbeEngine(adapter), payload, settings, self._set_ready)
            engine = TrafficObserver(adapter, self._probe)
        self._is_listed = self._health.register(self._name, is_target=payload is not None, is_probed=True)
        return engine

    def begin(self, spawn: Callable[[Work], Callable[[], None]]) -> None:
        """Called when the worker is registered: it is ready, or probed from now on."""
        if self._probe is None:
            self._set_ready(True)
        else:
            self._end_probe = spawn(self._probe.run)

    def end(self) -> None:
        """Not ready from now on, whatever the probe still observes."""
        if self._probe is not None:
            self._probe.stop()
        self._end_probe()
        self._set_ready(False)

    def forget(self) -> None:
        """Remove the endpoint."""
        if self._is_listed:
            self._health.forget(self._name)

    def _set_ready(self, is_ready: bool) -> None:
        if self._is_listed:
            self._health.set_ready(self._name, is_ready)
