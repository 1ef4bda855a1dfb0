"""MigrationMetrics: how often requests migrate, how long that takes, and how many grow too long for it.

Source: dynamo lib/llm/src/http/service/metrics.rs, the model_migration family. Other than there, an answer that breaks
is counted when another worker is looked for, not when no worker may go on with it.
"""

from __future__ import annotations

from typing import Any, Literal

import anyio
from attrs import frozen

from pipeline.telemetry import Metrics

MigrationType = Literal["new_request", "ongoing_request"]
"""Whether no worker had taken the request yet, or one was answering."""
Outcome = Literal["success", "failure", "cancelled"]


class MigrationMetrics:
    """What a front end counts of its migrations.

    meter: by default the one that is configured globally
    model: the name of the model in all of them; by default the one each request names
    """

    def __init__(self, meter: Any = None, *, model: str | None = None, prefix: str | None = None) -> None:
        self._metrics = Metrics(meter, family="frontend", prefix=prefix)
        self._model = model

    def count(self, model: str, kind: MigrationType) -> None:
        """Count a dispatch that failed, or a stream that broke, so that another worker is looked for."""
        self._metrics.add("model_migration_total", model=self._model or model, migration_type=kind)

    def too_long(self, model: str) -> None:
        """Count a request that grew past the length up to which requests migrate."""
        self._metrics.add("model_migration_max_seq_len_exceeded_total", model=self._model or model)

    def begins(self, model: str, kind: MigrationType, began_s: float | None = None) -> MigrationTimer:
        """Time the search for another worker, from `began_s` by the loop's clock, by default from now."""
        return MigrationTimer(
            self._metrics, self._model or model, kind, anyio.current_time() if began_s is None else began_s
        )


@frozen
class MigrationTimer:
    """One search for another worker, from the failure on."""

    metrics: Metrics
    model: str
    kind: MigrationType
    began_s: float
    """When the failure was seen, by the loop's clock."""

    def ends(self, outcome: Outcome) -> None:
        """Record that there is another worker, or that there will be none."""
        took_s = anyio.current_time() - self.began_s
        self.metrics.record(
            "model_migration_duration_seconds", took_s, model=self.model, migration_type=self.kind, outcome=outcome
        )
