"""WorkerHealth: one worker in the health of its process, and the canary that may watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline import Annotated, AsyncEngine
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

from .background import Work
from .canary import Canary, CanarySettings, HeardEngine
from .health import SystemHealth
from .probe import ProbeEngine

if TYPE_CHECKING:
    from .adapter import RequestAdapter

TokenEngine = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]


class WorkerHealth:
    """Listed from `watched` to `forget`, as not ready at first.

    Where the name is listed already it is another worker's, and nothing is said of it.
    """

    def __init__(self, health: SystemHealth, name: str) -> None:
        self._health, self._name = health, name
        self._is_listed = False
        self._canary: Canary | None = None
        self._end_canary: Callable[[], None] = lambda: None

    def watched(
        self, adapter: RequestAdapter, payload: Mapping[str, Any] | None, settings: CanarySettings
    ) -> TokenEngine:
        """What is to be served in the adapter's place. To be called before: the very first request counts."""
        engine: TokenEngine = adapter
        if payload is not None and settings.is_enabled:
            self._canary = Canary(ProbeEngine(adapter), payload, settings, self._say)
            engine = HeardEngine(adapter, self._canary)
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
