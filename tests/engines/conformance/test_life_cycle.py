"""Each failure of the conformance kit in the life around the requests has engines with only this failure."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines import (
    EngineConfig,
    MetricsBindings,
    MetricsContext,
    PushSource,
)
from tests.engines.conformance.worlds import (
    TOKEN_S,
    BrokenEngine,
    BrokenEngines,
    Sevens,
    expect_its_failures,
)

BROKEN = BrokenEngines()
breaks = BROKEN.breaks


@breaks("StartFailed")
class StartRaises(Sevens):
    async def start(self, worker_id: int) -> EngineConfig:
        raise RuntimeError("no such model")


@breaks("StartFailed")
class StartHangs(Sevens):
    async def start(self, worker_id: int) -> Any:
        await anyio.sleep_forever()


@breaks("StartFailed")
class StartForgetsItsConfig(Sevens):
    async def start(self, worker_id: int) -> Any:
        """Return None."""


@breaks("EmptyModelInConfig")
class Nameless(Sevens):
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="")


@breaks("BackgroundFailed")
class BackgroundRaises(Sevens):
    async def background(self) -> None:
        await anyio.sleep(TOKEN_S)
        raise RuntimeError("lost the scheduler")


@breaks("KvEventSourcesFailed")
class SourcesRaise(Sevens):
    async def kv_event_sources(self) -> Any:
        raise RuntimeError("no sources")


@breaks("KvEventSourcesFailed")
class SourcesHang(Sevens):
    async def kv_event_sources(self) -> Any:
        await anyio.sleep_forever()


@breaks("KvEventSourcesFailed")
class SourcesNameARankTwice(Sevens):
    async def kv_event_sources(self) -> Any:
        return [PushSource(print), PushSource(print)]


@breaks("KvEventSourcesNotIdempotent")
class SourcesChangeTheirOrder(Sevens):
    ranks = (1, 0)

    async def kv_event_sources(self) -> Any:
        self.ranks = self.ranks[::-1]
        return [PushSource(print, rank) for rank in self.ranks]


@breaks("SetupMetricsFailed")
class MetricsRaise(Sevens):
    async def setup_metrics(self, context: MetricsContext) -> Any:
        raise RuntimeError("no metrics")


@breaks("SetupMetricsFailed")
class MetricsHang(Sevens):
    async def setup_metrics(self, context: MetricsContext) -> Any:
        await anyio.sleep_forever()


@breaks("SetupMetricsFailed")
class MetricsNameARankTwice(Sevens):
    async def setup_metrics(self, context: MetricsContext) -> Any:
        return MetricsBindings([3, 3])


@breaks("ComponentMetricsNotIdempotent")
class MetricsGrow(Sevens):
    ranks = 0

    async def setup_metrics(self, context: MetricsContext) -> Any:
        self.ranks += 1
        return MetricsBindings(range(self.ranks))


@breaks("CleanupFailed")
class CleanupRaises(Sevens):
    async def cleanup(self) -> None:
        if self.is_started:
            raise RuntimeError("still in use")


@breaks("CleanupFailed")
class CleanupHangs(Sevens):
    async def cleanup(self) -> None:
        if self.is_started:
            await anyio.sleep_forever()


@breaks("SecondCleanupFailed")
class CleansUpOnce(Sevens):
    is_clean = False

    async def cleanup(self) -> None:
        if self.is_clean:
            raise RuntimeError("freed twice")
        self.is_clean = True


@breaks("CleanupWithoutStartFailed")
class CleansUpOnlyWhatStarted(Sevens):
    async def cleanup(self) -> None:
        if not self.is_started:
            raise AttributeError("no model")


@breaks("DrainFailed")
class DrainRaises(Sevens):
    async def drain(self) -> None:
        raise RuntimeError("still in use")


@breaks("DrainFailed")
class DrainHangs(Sevens):
    async def drain(self) -> None:
        await anyio.sleep_forever()


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_a_broken_engine_fails_its_check_and_no_other(
    broken: BrokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.conformance.answers.MOST_CHUNKS", 12_000)  # still above the long request
    await expect_its_failures(broken)


def test_every_step_of_its_life_has_an_engine_that_fails_it() -> None:
    assert BROKEN.names == {
        *("StartFailed", "EmptyModelInConfig", "BackgroundFailed", "KvEventSourcesFailed"),
        *("KvEventSourcesNotIdempotent", "SetupMetricsFailed", "ComponentMetricsNotIdempotent", "DrainFailed"),
        *("CleanupFailed", "SecondCleanupFailed", "CleanupWithoutStartFailed"),
    }
