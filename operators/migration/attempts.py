"""Attempts: one request on its way from worker to worker: what was delivered, and the stream of the next worker.

Source: dynamo lib/llm/src/migration.rs, RetryManager. Other than there, the request stays as it came and each attempt
is made from it, and a stop or kill reaches an attempt that is over only while a stage below keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, evolve, field

from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    Context,
    ContractViolation,
    ResponseStream,
    Take,
    unless_killed,
)
from pipeline.protocols import (
    BackendOutput,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    MigrationState,
    PreprocessedRequest,
    TraceLink,
)
from pipeline.telemetry import spanned

from .metrics import MigrationMetrics, MigrationType, Outcome
from .policy import (
    Failure,
    Item,
    Output,
    Verdict,
    behind,
    continuation,
    decide,
    ending,
    error_shown,
    is_migratable,
    is_too_long,
)

Next = AsyncEngine[PreprocessedRequest, Item]

_log = logging.getLogger(__name__)


def _plain(index: int | None) -> LLMEngineOutput:
    """Return an output of a plain token of that choice; what is looked up of the last one is in all of them alike."""
    return LLMEngineOutput([], index=index)


_PLAIN = {index: _plain(index) for index in (None, *range(16))}
"""Shared by all requests: an output of each would be fetched from memory for each token."""


@define(eq=False)
class Attempts:
    """The attempts of one request. Its reader keeps `delivered`, `last`, `kind` and `link` up to date."""

    request: Context[PreprocessedRequest]
    """The request as it came."""
    next: Next
    attempts_left: int
    """How many more workers it may be sent to."""
    max_seq_len_tokens: int | None
    """The length, prompt and answer together, up to which it may migrate; None for any."""
    metrics: MigrationMetrics
    tracer: Any = None
    """Makes the span of each further attempt."""
    delivered: list[int] = field(factory=list)
    """The tokens the caller has."""
    last: Output | None = None
    """The last output that had tokens."""
    kind: type[Output] | None = None
    """The class of the outputs, once there was one."""
    link: TraceLink | None = None
    """The span of the last worker that reported one."""
    state: MigrationState = field(factory=MigrationState)
    """What the stages below share about the attempts: the workers that failed, and text that was held back."""
    _count: int = field(default=0, init=False)
    _search: tuple[MigrationType, float] | None = field(default=None, init=False)
    """What another worker is looked for, and since when by the loop's clock."""
    _workers: tuple[Any, Any] | None = field(default=None, init=False)
    """Those the tracker named for prefill and decode before another worker was looked for."""
    _is_finished: bool = field(default=False, init=False)
    _has_more_than_tokens: bool = field(default=False, init=False)
    _is_too_long: bool = field(default=False, init=False)
    _last_item: Item | Exception | None = field(default=None, init=False)
    _take: Take = field(init=False)
    """Takes plain tokens, if the stream is fed."""
    _attempt: Context[PreprocessedRequest] = field(init=False)
    """The request as it was last sent. Kept, because a stop of the caller's reaches it only while it is referenced."""

    # -- streams

    async def next_stream(self) -> ResponseStream[Item]:
        """Return the stream of the first worker that takes it. Raise the last error, or Cancelled after a stop."""
        try:
            stream = await self._first_taker()
        except BaseException as error:
            gave_up = isinstance(error, Cancelled) or not isinstance(error, Exception) or self.request.is_stopped
            self._search_ends("cancelled" if gave_up else "failure")
            raise
        self._search_ends("success")
        return stream

    async def resume(self, broke: Item | Exception, stream: ResponseStream[Item]) -> ResponseStream[Item] | None:
        """Close a stream that broke, and return the stream of the worker that goes on; None if the answer ends here.

        The first case that holds for the verdict of `decide`; `last_items` has what the answer then ends with:

        1. RETRY: the next worker goes on. If none can, 2 with its error among the causes, or 4 after a stop
        2. PASS_ON: the break as it came
        3. END: nothing, the answer is complete
        4. END_CANCELLED: an item with the finish reason `cancelled`
        5. END_LENGTH: an item with the finish reason `length`
        """
        error = broke if isinstance(broke, Exception) else broke.error
        assert error is not None
        began_s = anyio.current_time()
        try:
            await stream.aclose()  # its worker is given up, whatever that raises
        except Exception:
            _log.exception("closing a broken stream of request %s failed", self.request.id)
        verdict = self._verdict(error, self.max_seq_len_tokens)
        if verdict is Verdict.PASS_ON:
            self._log_if_exhausted(error)
        if verdict is Verdict.RETRY:
            try:
                return await self._resumed(error, began_s)
            except Exception as ended:
                verdict = Verdict.END_CANCELLED if self.request.is_stopped else Verdict.PASS_ON
                broke = _with_error(broke, error_shown(error, ended))
        if verdict is Verdict.PASS_ON:
            self._last_item = broke
        elif verdict is Verdict.END_CANCELLED:
            self._last_item = ending(self.kind, FinishReason.CANCELLED, self.last)
        elif verdict is Verdict.END_LENGTH:
            usage = CompletionUsage.of(len(self.request.payload.token_ids), len(self.delivered))
            self._last_item = ending(self.kind, FinishReason.LENGTH, self.last, usage)
        return None

    def last_items(self) -> Iterator[Item]:
        """What a broken answer ends with, unless it is killed: text that was held back, then an item or an error."""
        text = self.state.held_text
        if text and not self.request.is_killed:
            yield Annotated(BackendOutput([], [], text))
        last = self._last_item
        if last is None or self.request.is_killed:
            return
        if isinstance(last, Exception):
            raise last
        yield last

    async def _resumed(self, error: Exception, began_s: float) -> ResponseStream[Item]:
        """Return the rest of the answer, from another worker, its counts those of the whole answer."""
        count = len(self.delivered)
        _log.warning("request %s broke after %d tokens and moves on: %r", self.request.id, count, error)
        self._search_begins("ongoing_request", began_s)
        stream = await self.next_stream()
        self.state.held_text = ""
        return stream.map(behind(count, self.last)) if count else stream

    async def _first_taker(self) -> ResponseStream[Item]:
        request = self.request
        while True:
            if request.is_stopped:
                raise Cancelled(f"request {request.id} was stopped before a worker took it")
            try:
                self._begin_attempt()
                if self._count == 1:
                    return await self.next.generate(self._attempt)
                return await self._retried()
            except Exception as error:
                if not is_migratable(request.payload, error):
                    raise
                self._search_begins("new_request")
                if self._verdict(error, None, had_stream=False) is Verdict.PASS_ON:
                    self._log_if_exhausted(error)
                    raise
                _log.warning("request %s was not taken and moves on: %r", request.id, error)

    async def _retried(self) -> ResponseStream[Item]:
        """Return one further worker's stream, in a span that lasts as long as it."""
        await checkpoint()  # whatever the limit: refusals that wait for nothing must not keep the loop
        # A kill ends the wait, whatever the next stage waits for.
        message = f"request {self.request.id} was killed before another worker took it"

        async def send(attempt: Context[PreprocessedRequest]) -> ResponseStream[Item]:
            return await unless_killed(self.next.generate(attempt), attempt, message)

        if self._attempt.trace is None:
            return await send(self._attempt)
        attributes: dict[str, int | list[str]] = {
            "migration.attempt": self._count,
            "migration.delivered_tokens": len(self.delivered),
            "migration.excluded_worker_ids": [str(worker_id) for worker_id in self.state.excluded_worker_ids],
        }
        link = self.link or self.state.failed_link
        return await spanned(
            self._attempt, "migration.retry", send, tracer=self.tracer, attributes=attributes, link=link
        )

    def _begin_attempt(self) -> None:
        self._count += 1
        self.attempts_left -= 1
        payload = self.request.payload
        self._attempt = self.request.child(continuation(payload, self.delivered, self.link, self.state))
        if self._count > 1 and (tracker := payload.tracker) is not None:
            if self._workers is None:
                self._workers = tracker.prefill_worker, tracker.decode_worker
            tracker.begin_attempt(len(self.delivered))

    # -- items

    def relay(self, take: Take) -> Take:
        """Return what takes plain tokens of the first worker, as its reader does items, and hands them to `take`."""
        self._take = take
        return self._take_token

    def _take_token(self, token_id: int, index: int | None, text: str | None = None) -> bool:
        self.delivered.append(token_id)
        self.last = _PLAIN.get(index) or _plain(index)
        if self.kind is None:
            self.kind = LLMEngineOutput if text is None else BackendOutput
        take = self._take
        return take(token_id, index) if text is None else take(token_id, index, text)

    def check_kind(self, data: Any) -> type[Output]:
        """Return the class of the first output. Raise ContractViolation for an item without an engine's output."""
        if not isinstance(data, LLMEngineOutput | BackendOutput):
            raise ContractViolation(f"an item to migrate carries an engine's output, this one {type(data).__name__}")
        self.kind = type(data)
        return self.kind

    def note(self, data: Output) -> None:
        """Take an output without tokens into account."""
        if data.finish_reason is not None:
            self._is_finished = True
        if data.worker_trace_link is not None:
            self.link = data.worker_trace_link
        others = (data.text, data.disaggregated_params, data.encoder_result, getattr(data, "content_parts", None))
        self._has_more_than_tokens |= any(others)

    def check_length(self) -> None:
        """Count, once, a request that could migrate if it were not too long."""
        if self.max_seq_len_tokens is None or self._is_too_long or not self.attempts_left:
            return
        payload = self.request.payload
        if is_too_long(payload, len(self.delivered), self.max_seq_len_tokens):
            self._is_too_long = True
            self.metrics.too_long(payload.model)

    def _verdict(self, error: Exception, max_seq_len_tokens: int | None, *, had_stream: bool = True) -> Verdict:
        failure = Failure(
            error=error,
            attempts_left=self.attempts_left,
            delivered_tokens=len(self.delivered),
            had_stream=had_stream,
            is_stopped=self.request.is_stopped,
            is_finished=self._is_finished or (self.last is not None and self.last.finish_reason is not None),
            has_more_than_tokens=self._has_more_than_tokens,
        )
        return decide(failure, self.request.payload, max_seq_len_tokens)

    def _log_if_exhausted(self, error: Exception) -> None:
        if not self.attempts_left and is_migratable(self.request.payload, error):
            tokens, attempts = len(self.delivered), self._count
            _log.warning(
                "request %s fails after %d tokens and %d attempts: %r", self.request.id, tokens, attempts, error
            )

    # -- the search for another worker

    def _search_begins(self, kind: MigrationType, began_s: float | None = None) -> None:
        """Count a failure after which another worker is looked for, or would be if there were an attempt left."""
        self.metrics.count(self.request.payload.model, kind)
        if self._search is None:
            self._search = kind, anyio.current_time() if began_s is None else began_s

    def _search_ends(self, outcome: Outcome) -> None:
        """The search is over, if there was one. After one in vain the tracker names the workers from before."""
        search, self._search = self._search, None
        workers, self._workers = self._workers, None
        tracker = self.request.payload.tracker
        if tracker is not None and workers is not None and outcome != "success":
            tracker.prefill_worker, tracker.decode_worker = workers
        if search is not None:
            self.metrics.searched(self.request.payload.model, *search, outcome)


def _with_error(broke: Item | Exception, shown: Exception) -> Item | Exception:
    """Return the break as it came, but with this error."""
    if isinstance(broke, Exception):
        return shown
    return broke if shown is broke.error else evolve(broke, error=Annotated[Any].from_error(shown).error)
