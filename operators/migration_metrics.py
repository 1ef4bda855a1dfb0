"""MigrationMetrics: how often requests move on, how long that takes, and how many grow too long for it.

Source: dynamo lib/llm/src/http/service/metrics.rs, the model_migration family. Other than there, an answer that breaks
is counted when another worker is looked for, not when nobody may go on with it.
"""

from __future__ import annotations

from typing import Any, Literal

import anyio
from attrs import frozen

from pipeline.metrics import Metrics

MigrationType = Literal["new_request", "ongoing_request"]
"""Whether no worker had taken the request yet, or one was answering."""
Outcome = Literal["success", "failure", "cancelled"]


class MigrationMetrics:
    """What a front end counts of its migrations. Without a meter the globally configured one is used.

    `model` is the name they carry; None: the one each request asks for.
    """

    def __init__(self, meter: Any = None, *, model: str | None = None, prefix: str | None = None) -> None:
        self._metrics = Metrics(meter, family="frontend", prefix=prefix)
        self._model = model

    def count(self, model: str, kind: MigrationType) -> None:
        """A dispatch failed, or another worker is looked for."""
        self._metrics.add("model_migration_total", model=self._model or model, migration_type=kind)

    def too_long(self, model: str) -> None:
        """A request grew past the length up to which they migrate."""
        self._metrics.add("model_migration_max_seq_len_exceeded_total", model=self._model or model)

    def begins(self, model: str, kind: MigrationType, began_s: float | None = None) -> Move:
        """A failure was seen, just now unless it is said when."""
        return Move(self._metrics, self._model or model, kind, anyio.current_time() if began_s is None else began_s)


@frozen
class Move:
    """One search for another worker, from the failure on. Times are the loop's, in seconds."""

    metrics: Metrics
    model: str
    kind: MigrationType
    began_s: float

    def ends(self, outcome: Outcome) -> None:
        """There is another worker, or there will be none."""
        took_s = anyio.current_time() - self.began_s
        self.metrics.record(
            "model_migration_duration_seconds", took_s, model=self.model, migration_type=self.kind, outcome=outcome
        )
