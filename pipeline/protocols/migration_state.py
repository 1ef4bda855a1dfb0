"""MigrationState: what the attempts of one request tell each other.

Source: dynamo lib/llm/src/migration.rs and lib/kv-router, the shared list of excluded workers. Other than there every
router keeps it, not only the KV-aware one in the same process.
"""

from __future__ import annotations

from attrs import define, field

from .trace_link import TraceLink


@define(slots=True, eq=False)
class MigrationState:
    """The workers that failed this request, in order and each once, and the last of their errors.

    Whoever sends the request to workers writes it, before the error is shown to anybody, and asks none of them again.
    `held_text` is the end of the text of the delivered tokens that was not shown when the stream broke, because a stop
    string may begin there: for whoever decodes the next stream, or to be shown if there is none. Shared by reference,
    stays in this process.
    """

    excluded_worker_ids: list[int] = field(factory=list)
    last_error: Exception | None = None
    held_text: str = ""
    failed_link: TraceLink | None = None
    """The span of the last of them, where the request is traced: that of its router, for its own may not be known."""

    def exclude(self, worker_id: int, error: Exception, link: TraceLink | None = None) -> None:
        """Note that the worker failed the request with this error, below the span of `link`."""
        self.last_error, self.failed_link = error, link
        if worker_id not in self.excluded_worker_ids:
            self.excluded_worker_ids.append(worker_id)
