"""A Migration over workers that fail as planned, and what its caller sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from operators import Migration, MigrationMetrics
from pipeline import Annotated, AsyncEngine, Context, link
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.testing import Fault, Faults, ScriptedEngine, watch_streams

PROMPT = [1, 2, 3]


def request(**fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest(list(PROMPT), model="m", **{"stop_conditions": StopConditions(max_tokens=10), **fields})


def speaking(payload: PreprocessedRequest) -> list[Annotated[LLMEngineOutput]]:
    """101 to 110, one item each, from where the prompt leaves off; the last one says why it ends."""
    said = len(payload.token_ids) - len(PROMPT)
    outputs = [LLMEngineOutput([101 + said + i]) for i in range(payload.stop_conditions.max_tokens or 0)]
    if outputs:
        outputs[-1].finish_reason = FinishReason.LENGTH
    return [Annotated(output) for output in outputs]


class Recorded:
    """What was counted."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.metrics = MigrationMetrics(MeterProvider([self._reader], shutdown_on_exit=False).get_meter("test"))

    def points(self, name: str, *labels: str) -> dict[tuple[Any, ...], Any]:
        data = self._reader.get_metrics_data()
        known = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        points: list[Any] = [p for m in known if m.name == f"dynamo_frontend_{name}" for p in m.data.data_points]
        assert all(p.attributes["model"] == "m" for p in points)
        return {tuple(p.attributes[label] for label in labels): getattr(p, "value", None) or p.count for p in points}

    def counts(self) -> tuple[int, int]:
        """New requests and ongoing ones."""
        found = self.points("model_migration_total", "migration_type")
        return found.get(("new_request",), 0), found.get(("ongoing_request",), 0)

    def durations(self) -> dict[tuple[Any, ...], Any]:
        return self.points("model_migration_duration_seconds", "migration_type", "outcome")

    def seconds(self) -> dict[tuple[Any, ...], float]:
        """How long the moves took, in all."""
        data = self._reader.get_metrics_data()
        assert data is not None
        found = [m for m in data.resource_metrics[0].scope_metrics[0].metrics if m.name.endswith("duration_seconds")]
        points: list[Any] = [point for m in found for point in m.data.data_points]
        return {tuple(p.attributes[label] for label in ("migration_type", "outcome")): p.sum for p in points}

    def too_long(self) -> int:
        return sum(self.points("model_migration_max_seq_len_exceeded_total").values())


class Seen:
    """What the caller of one request saw."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.raised: Exception | None = None

    @classmethod
    async def of(cls, graph: AsyncEngine[Any, Any], asked: Context[Any]) -> Seen:
        seen = cls()
        try:
            async with await graph.generate(asked) as stream:
                async for item in stream:
                    seen.items.append(item)
        except Exception as error:
            seen.raised = error
        return seen

    @property
    def tokens(self) -> list[int]:
        return [token_id for item in self.items if item.data is not None for token_id in item.data.token_ids]

    @property
    def finish(self) -> FinishReason | None:
        return self.items[-1].data.finish_reason if self.items and self.items[-1].data is not None else None


class World:
    """Workers that fail as planned: one entry for each attempt, the last one for all that follow."""

    def __init__(self, *plan: Fault | None, limit: int = 3, script: Any = speaking, **settings: Any) -> None:
        self.recorded = Recorded()
        self.engine = ScriptedEngine(script)
        self.contexts: list[Context[PreprocessedRequest]] = []
        self._plan: Sequence[Fault | None] = plan or [None]
        self.migration = Migration(limit, metrics=self.recorded.metrics, **settings)
        self.faults = Faults(plan=self._next)
        self.graph: AsyncEngine[Any, Any] = link(self.migration, self.faults, self.engine)

    def _next(self, context: Context[Any]) -> Fault | None:
        self.contexts.append(context)
        return self._plan[min(len(self.contexts), len(self._plan)) - 1]

    @property
    def asked(self) -> list[PreprocessedRequest]:
        return [context.payload for context in self.contexts]

    async def ask(self, payload: PreprocessedRequest | None = None) -> Seen:
        """What is seen of one request; nothing of it is left open."""
        with watch_streams() as streams:
            seen = await Seen.of(self.graph, Context(payload or request()))
        assert (streams.open, self.engine.open) == ([], 0)
        return seen


@pytest.fixture
def world_of() -> type[World]:
    """Makes a World: `world_of(first_fault, None)`."""
    return World


@pytest.fixture
def see() -> Any:
    """Asks a graph: what the caller sees."""
    return Seen.of


@pytest.fixture
def asking() -> Any:
    """Makes a request of three tokens for ten more."""
    return request


@pytest.fixture
def model() -> Any:
    """What a healthy worker answers to a payload."""
    return speaking
