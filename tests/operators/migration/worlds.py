"""A Migration over workers that fail as planned, the metrics it counts, and what its caller receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from operators import Migration
from operators.migration import MigrationMetrics
from pipeline import Annotated, AsyncEngine, Context, Disconnected, link
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.testing import Fault, Faults, ScriptedEngine, watch_streams

PROMPT = [1, 2, 3]
"""The prompt of `make_request`."""

ALL = list(range(101, 111))
"""The tokens of the whole answer to `make_request`."""

GONE = Disconnected("gone")
"""The error of a worker whose connection breaks."""

REFUSED = Fault(fail_to_connect=True)
"""An attempt whose dispatch fails."""


def broken(after: int) -> Fault:
    """An attempt that breaks after this many items."""
    return Fault(disconnect_after=after)


def make_request(**fields: Any) -> PreprocessedRequest:
    """A request with PROMPT for ten tokens of model `m`; `fields` replace or extend its own."""
    return PreprocessedRequest(list(PROMPT), model="m", **{"stop_conditions": StopConditions(max_tokens=10), **fields})


def output(token_id: int, **fields: Any) -> Annotated[Any]:
    """An item of one token."""
    return Annotated(LLMEngineOutput([token_id], **fields))


def healthy(payload: PreprocessedRequest) -> list[Annotated[LLMEngineOutput]]:
    """The script of a worker that does not fail: ALL, one item each, from where the prompt leaves off.

    The last item has the finish reason.
    """
    generated = len(payload.token_ids) - len(PROMPT)
    outputs = [LLMEngineOutput([101 + generated + i]) for i in range(payload.stop_conditions.max_tokens or 0)]
    if outputs:
        outputs[-1].finish_reason = FinishReason.LENGTH
    return [Annotated(output) for output in outputs]


class Recorded:
    """The metrics of one Migration, and what they have counted."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.metrics = MigrationMetrics(MeterProvider([self._reader], shutdown_on_exit=False).get_meter("test"))

    def points(self, name: str, *labels: str) -> dict[tuple[Any, ...], Any]:
        """The value, or the number of samples, of each series of a metric, by the values of these labels."""
        data = self._reader.get_metrics_data()
        known = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        points: list[Any] = [p for m in known if m.name == f"dynamo_frontend_{name}" for p in m.data.data_points]
        assert all(p.attributes["model"] == "m" for p in points)
        return {tuple(p.attributes[label] for label in labels): getattr(p, "value", None) or p.count for p in points}

    def counts(self) -> tuple[int, int]:
        """Migrations of new requests and of ongoing ones."""
        found = self.points("model_migration_total", "migration_type")
        return found.get(("new_request",), 0), found.get(("ongoing_request",), 0)

    def durations(self) -> dict[tuple[Any, ...], Any]:
        """How many durations were recorded, by type and outcome."""
        return self.points("model_migration_duration_seconds", "migration_type", "outcome")

    def seconds(self) -> dict[tuple[Any, ...], float]:
        """The sum of the durations, by type and outcome."""
        data = self._reader.get_metrics_data()
        assert data is not None
        found = [m for m in data.resource_metrics[0].scope_metrics[0].metrics if m.name.endswith("duration_seconds")]
        points: list[Any] = [point for m in found for point in m.data.data_points]
        return {tuple(p.attributes[label] for label in ("migration_type", "outcome")): p.sum for p in points}

    def too_long(self) -> int:
        """How many requests were longer than the cap."""
        return sum(self.points("model_migration_max_seq_len_exceeded_total").values())


@define
class Answer:
    """What the caller of one request received."""

    items: list[Any] = field(factory=list)
    raised: Exception | None = None
    """The error that ended it, raised by `generate` or by the stream; None where the stream just ended."""

    @property
    def tokens(self) -> list[int]:
        """The tokens of all items."""
        return [token_id for item in self.items if item.data is not None for token_id in item.data.token_ids]

    @property
    def finish(self) -> FinishReason | None:
        """The finish reason of the last item."""
        return self.items[-1].data.finish_reason if self.items and self.items[-1].data is not None else None


async def receive(graph: AsyncEngine[Any, Any], context: Context[Any]) -> Answer:
    """Send the request and read its answer to the end."""
    answer = Answer()
    try:
        async with await graph.generate(context) as stream:
            async for item in stream:
                answer.items.append(item)
    except Exception as error:
        answer.raised = error
    return answer


class World:
    """A Migration over workers that fail as planned.

    `plan` has the fault of each attempt, None for none; its last entry is that of all later attempts.
    """

    def __init__(self, *plan: Fault | None, limit: int = 3, script: Any = healthy, **settings: Any) -> None:
        """`limit` and `settings` are those of the Migration, `script` that of the workers."""
        self.recorded = Recorded()
        self.engine = ScriptedEngine(script)
        self.contexts: list[Context[PreprocessedRequest]] = []
        """The contexts of all attempts, in order."""
        self._plan: Sequence[Fault | None] = plan or [None]
        self.migration = Migration(limit, metrics=self.recorded.metrics, **settings)
        self.faults = Faults(plan=self._next)
        self.graph: AsyncEngine[Any, Any] = link(self.migration, self.faults, self.engine)

    def _next(self, context: Context[Any]) -> Fault | None:
        self.contexts.append(context)
        return self._plan[min(len(self.contexts), len(self._plan)) - 1]

    @property
    def attempts(self) -> list[PreprocessedRequest]:
        """The request of each attempt, in order."""
        return [context.payload for context in self.contexts]

    async def collect(self, payload: PreprocessedRequest | None = None) -> Answer:
        """The answer to one request, `make_request()` unless given; no stream of it stays open."""
        with watch_streams() as streams:
            answer = await receive(self.graph, Context(payload or make_request()))
        assert (streams.open, self.engine.open) == ([], 0)
        return answer
