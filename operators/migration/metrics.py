"""MigrationMetrics: how often requests migrate, how long that takes, and how many grow too long for it.

Source: dynamo lib/llm/src/http/service/metrics.rs, the model_migration family. Other than there, an answer that breaks
is counted when another worker is looked for, not when no worker may go on with it.
"""

from __future__ import annotations

from typing import Any, Literal

import anyio

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

    def searched(self, model: str, kind: MigrationType, began_s: float, outcome: Outcome) -> None:
        """Record the time of a search for another worker, since the failure at `began_s` by the loop's clock."""
        took_s = anyio.current_time() - began_s
        self._metrics.record(
            "model_migration_duration_seconds",
            took_s,
            model=self._model or model,
            migration_type=kind,
            outcome=outcome,
        )
