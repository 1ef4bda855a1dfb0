"""Journey: what is kept of one request while it may move from worker to worker.

Source: dynamo lib/llm/src/migration.rs, RetryManager. Other than there, the request stays as it came and each attempt
is made from it, and an attempt that is over hears of its caller only while somebody below keeps it.

MigrationMetrics: how often requests move on, how long that takes, and how many grow too long for it.

Source: dynamo lib/llm/src/http/service/metrics.rs, the model_migration family. Other than there, an answer that breaks
is counted when another worker is looked for, not when nobody may go on with it.
"""

from __future__ import annotations

from typing import Any, Literal

import anyio
from attrs import define, field, frozen

from pipeline import Annotated, Context, ContractViolation
from pipeline.protocols import (
    BackendOutput,
    CompletionUsage,
    LLMEngineOutput,
    MigrationState,
    PreprocessedRequest,
    TraceLink,
)
from pipeline.telemetry import Metrics

from .policy import Break, Item, Output, Verdict, continuation, decide

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


@define(eq=False)
class Journey:
    """One request on its way from worker to worker. `attempts` is how many it has been sent to."""

    request: Context[PreprocessedRequest]
    attempts_left: int
    attempts: int = 0
    delivered: list[int] = field(factory=list)
    state: MigrationState = field(factory=MigrationState)
    link: TraceLink | None = None
    last: Output | None = None
    """The last output that had tokens."""
    kind: type[Output] | None = None
    move: Move | None = None
    workers: tuple[Any, Any] | None = None
    """Those the tracker named for prefill and decode before another worker was looked for."""
    is_finished: bool = False
    has_more_than_tokens: bool = False
    is_too_long: bool = False
    attempt: Context[PreprocessedRequest] = field(init=False)
    """The request as it was last sent. Kept: a stop of the caller's reaches it only while somebody does."""

    def begin_attempt(self) -> None:
        """Makes the request for the next worker."""
        self.attempts += 1
        self.attempts_left -= 1
        payload = self.request.payload
        self.attempt = self.request.child(continuation(payload, self.delivered, self.link, self.state))
        if self.attempts > 1 and (tracker := payload.tracker) is not None:
            if self.workers is None:
                self.workers = tracker.prefill_worker, tracker.decode_worker
            tracker.begin_attempt(len(self.delivered))

    def sees(self, data: Any) -> type[Output]:
        """The kind of the first output. Raises ContractViolation for one that is none."""
        if not isinstance(data, LLMEngineOutput | BackendOutput):
            raise ContractViolation(f"an item to migrate carries an engine's output, this one {type(data).__name__}")
        self.kind = type(data)
        return self.kind

    def notes(self, data: Output) -> None:
        """What an output without tokens tells."""
        if data.finish_reason is not None:
            self.is_finished = True
        if data.worker_trace_link is not None:
            self.link = data.worker_trace_link
        others = (data.text, data.disaggregated_params, data.encoder_result, getattr(data, "content_parts", None))
        self.has_more_than_tokens |= any(others)

    def verdict(self, error: Exception, max_seq_len_tokens: int | None, *, had_stream: bool = True) -> Verdict:
        """What becomes of the request after this error."""
        broken = Break(
            error=error,
            attempts_left=self.attempts_left,
            delivered_tokens=len(self.delivered),
            had_stream=had_stream,
            is_stopped=self.request.is_stopped,
            is_finished=self.is_finished or (self.last is not None and self.last.finish_reason is not None),
            has_more_than_tokens=self.has_more_than_tokens,
        )
        return decide(broken, self.request.payload, max_seq_len_tokens)

    def usage(self) -> CompletionUsage:
        """What prompt and delivered tokens come to."""
        return CompletionUsage.of(len(self.request.payload.token_ids), len(self.delivered))

    def held(self) -> Item | None:
        """The text that the decoder of the broken stream left for the next one, to be shown where there is none."""
        text = self.state.held_text
        return Annotated(BackendOutput([], [], text)) if text else None

    def arrives(self, outcome: Outcome) -> None:
        """The search for a worker is over, if there was one. After one in vain the tracker names those from before."""
        move, self.move = self.move, None
        workers, self.workers = self.workers, None
        tracker = self.request.payload.tracker
        if tracker is not None and workers is not None and outcome != "success":
            tracker.prefill_worker, tracker.decode_worker = workers
        if move is not None:
            move.ends(outcome)
