"""Migration: a broken stream goes on with another worker, and nothing is repeated."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint
from attrs import evolve

from pipeline import (
    Annotated,
    AsyncEngine,
    Cancelled,
    Context,
    InvalidArgument,
    Operator,
    ResponseStream,
    until_killed,
)
from pipeline.protocols import FinishReason, PreprocessedRequest
from pipeline.telemetry import AttributeValue, annotate, spanned

from .attempts import Journey, MigrationMetrics, MigrationType
from .policy import Item, Verdict, behind, ending, error_shown, is_migratable, is_too_long, restriction

U = TypeVar("U")
Next = AsyncEngine[PreprocessedRequest, Item]

LIMIT_MAX = 2**32 - 1

_log = logging.getLogger(__name__)


class Migration(Operator[PreprocessedRequest, Item, PreprocessedRequest, Item]):
    """Sends a request whose worker fails to another one, which goes on behind the tokens the caller has.

        request ──► as it is; after a failure with the delivered tokens as the end of its prompt ──►
        stream  ◄── of the first worker, then of the next one; each token once, in order         ◄──

    Stands below Preprocess, and above Detokenize, so that each worker's tokens are decoded behind those before; above
    PrefillRouter, so that prefill is repeated with the rest; and above the router, which leaves out whom the request
    has failed on. Takes what comes from Detokenize and what comes from engines.

    `limit` is how many more workers one request may be sent to, 0 for none. Which errors count is in `pipeline.errors`.
    Requests that are longer than `max_seq_len_tokens`, with what was delivered, do not move on. Nor does one that names
    its worker, that wants several choices, a guided form, or has a prompt of embeddings.

    What has to be sent again is a new request to its worker: it costs a prefill, sampling with a seed begins anew, and
    penalties see the delivered tokens as prompt. Usage and cumulative log probabilities are those of the whole answer.
    An answer that broke behind its last token ends with `length`.

    Where no other worker can go on, `generate` raises the last error; a stream ends with the error that broke it, in
    the way it came, why nobody could go on as the last of its causes. A request that is stopped moves nowhere:
    `generate` raises Cancelled, a broken stream ends with a `cancelled` item, also while another worker is being asked.
    A kill ends it there and then. A broken stream is closed before the next worker is asked.

    Source: dynamo lib/llm/src/migration.rs, Migration and RetryManager. What differs is told in `docs/migration.md`.
    """

    declares = (PreprocessedRequest, U, PreprocessedRequest, U)

    def __init__(
        self,
        limit: int,
        *,
        max_seq_len_tokens: int | None = None,
        metrics: MigrationMetrics | None = None,
        tracer: Any = None,
    ) -> None:
        if not 0 <= limit <= LIMIT_MAX:
            raise InvalidArgument(f"must be between 0 and {LIMIT_MAX}, got {limit}", field="limit")
        if max_seq_len_tokens is not None and not 1 <= max_seq_len_tokens <= LIMIT_MAX:
            text = f"must be between 1 and {LIMIT_MAX}, got {max_seq_len_tokens}"
            raise InvalidArgument(text, field="max_seq_len_tokens")
        self._limit = limit
        self._max_seq_len_tokens = max_seq_len_tokens
        self._metrics = MigrationMetrics() if metrics is None else metrics
        self._tracer = tracer
        self._warned: set[str] = set()

    async def generate(self, request: Context[PreprocessedRequest], next: Next) -> ResponseStream[Item]:
        if not self._limit:
            return await self._only_stream(request, next)
        if (reason := restriction(request.payload)) is not None:
            self._log_restriction(request, reason)
            annotate(request, {"migration.off": reason})
            return await self._only_stream(request, next)
        journey = Journey(request, self._limit + 1)
        stream = await self._next_stream(journey, next)
        self._check_length(journey)
        return ResponseStream(self._continued(journey, stream, next), request, stream)

    def _log_restriction(self, request: Context[PreprocessedRequest], reason: str) -> None:
        """Warn of the first request with this reason only: a client that asks for it asks for it every time."""
        level = logging.DEBUG if reason in self._warned else logging.WARNING
        self._warned.add(reason)
        _log.log(level, "request %s will not migrate: %s", request.id, reason)

    # -- the answer

    async def _continued(
        self, journey: Journey, stream: ResponseStream[Item], next: Next
    ) -> AsyncGenerator[Item, None]:
        """The items of one stream after the other, until one ends by itself or nobody can go on."""
        delivered, kind, last = journey.delivered, journey.kind, journey.last
        following: ResponseStream[Item] | Iterator[Item] = stream
        try:
            while isinstance(following, ResponseStream):
                stream = following
                broke: Item | Exception | None = None
                try:
                    # Once per token. What is only asked after a break is found out then.
                    async for item in stream:
                        if item.error is not None:
                            broke = item
                            break
                        if (data := item.data) is not None:
                            if data.__class__ is not kind:
                                kind = journey.sees(data)
                            if token_ids := data.token_ids:
                                delivered += token_ids
                                last = data
                                if data.worker_trace_link is not None:
                                    journey.link = data.worker_trace_link
                            else:
                                journey.notes(data)
                        yield item
                except Exception as error:
                    broke = error
                journey.last = last
                following = iter(()) if broke is None else await self._after(broke, journey, stream, next)
        finally:
            self._check_length(journey)
            await stream.aclose()
        for item in following:
            yield item

    async def _after(
        self, broke: Item | Exception, journey: Journey, stream: ResponseStream[Item], next: Next
    ) -> ResponseStream[Item] | Iterator[Item]:
        """What follows a break, the broken stream being closed: the next worker's, or the last there is to say."""
        error = broke if isinstance(broke, Exception) else broke.error
        assert error is not None
        began_s = anyio.current_time()
        await _close(stream, journey)
        verdict = journey.verdict(error, self._max_seq_len_tokens)
        if verdict is Verdict.RETRY:
            try:
                return await self._resumed(error, journey, next, began_s)
            except Exception as ended:
                verdict = Verdict.END_CANCELLED if journey.request.is_stopped else Verdict.PASS_ON
                broke = _with_error(broke, error_shown(error, ended))
        last: Item | Exception | None = broke
        if verdict is Verdict.END:
            last = None
        elif verdict is Verdict.END_CANCELLED:
            last = ending(journey.kind, FinishReason.CANCELLED, journey.last)
        elif verdict is Verdict.END_LENGTH:
            last = ending(journey.kind, FinishReason.LENGTH, journey.last, journey.usage())
        return _last_words(journey, last)

    async def _resumed(self, error: Exception, journey: Journey, next: Next, began_s: float) -> ResponseStream[Item]:
        """The rest of the answer, from another worker, its counts those of the whole answer."""
        count = len(journey.delivered)
        _log.warning("request %s broke after %d tokens and moves on: %r", journey.request.id, count, error)
        self._seen(journey, "ongoing_request", began_s)
        stream = await self._next_stream(journey, next)
        journey.state.held_text = ""
        return stream.map(behind(count, journey.last)) if count else stream

    # -- asking workers

    async def _only_stream(self, request: Context[PreprocessedRequest], next: Next) -> ResponseStream[Item]:
        """The stream of the one worker a request may be sent to. A refusal counts as the last of any request does."""
        if request.is_stopped:
            raise Cancelled(f"request {request.id} was stopped before a worker took it")
        try:
            return await next.generate(request)
        except Exception as error:
            if is_migratable(request.payload, error):
                self._metrics.count(request.payload.model, "new_request")
                self._metrics.begins(request.payload.model, "new_request").ends("failure")
            raise

    async def _next_stream(self, journey: Journey, next: Next) -> ResponseStream[Item]:
        """The stream of the first worker that takes the request. Raises the last error, Cancelled after a stop."""
        try:
            stream = await self._first_taker(journey, next)
        except BaseException as error:
            gave_up = isinstance(error, Cancelled) or not isinstance(error, Exception) or journey.request.is_stopped
            journey.arrives("cancelled" if gave_up else "failure")
            raise
        journey.arrives("success")
        return stream

    async def _first_taker(self, journey: Journey, next: Next) -> ResponseStream[Item]:
        request = journey.request
        while True:
            if request.is_stopped:
                raise Cancelled(f"request {request.id} was stopped before a worker took it")
            try:
                journey.begin_attempt()
                if journey.attempts == 1:
                    return await next.generate(journey.attempt)
                return await self._retried(journey, next)
            except Exception as error:
                if not is_migratable(request.payload, error):
                    raise
                self._seen(journey, "new_request")
                if journey.verdict(error, None, had_stream=False) is Verdict.PASS_ON:
                    raise
                _log.warning("request %s was not taken and moves on: %r", request.id, error)

    async def _retried(self, journey: Journey, next: Next) -> ResponseStream[Item]:
        """One further worker's stream, in a span that lasts as long as it."""
        await checkpoint()  # whatever the limit: refusals that wait for nothing must not keep the loop
        if journey.attempt.trace is None:
            return await _unless_killed(next, journey.attempt)
        attributes: dict[str, AttributeValue] = {
            "migration.attempt": journey.attempts,
            "migration.delivered_tokens": len(journey.delivered),
            "migration.excluded_worker_ids": [str(worker_id) for worker_id in journey.state.excluded_worker_ids],
        }
        ask, link = partial(_unless_killed, next), journey.link or journey.state.failed_link
        return await spanned(
            journey.attempt, "migration.retry", ask, tracer=self._tracer, attributes=attributes, link=link
        )

    # -- counting

    def _seen(self, journey: Journey, kind: MigrationType, began_s: float | None = None) -> None:
        """A failure after which another worker is looked for, or would be if there were an attempt left."""
        model = journey.request.payload.model
        self._metrics.count(model, kind)
        if journey.move is None:
            journey.move = self._metrics.begins(model, kind, began_s)

    def _check_length(self, journey: Journey) -> None:
        """Counts, once, a request that could move on were it not too long."""
        payload, may_move = journey.request.payload, journey.attempts_left and not journey.is_too_long
        if may_move and is_too_long(payload, len(journey.delivered), self._max_seq_len_tokens):
            journey.is_too_long = True
            self._metrics.too_long(payload.model)


def _with_error(broke: Item | Exception, shown: Exception) -> Item | Exception:
    """The break as it came, but with this error."""
    if isinstance(broke, Exception):
        return shown
    return broke if shown is broke.error else evolve(broke, error=Annotated[Any].from_error(shown).error)


def _last_words(journey: Journey, last: Item | Exception | None) -> Iterator[Item]:
    """What a broken answer ends with, as long as nobody kills it: text that was held back, then an item or an error."""
    if (held := journey.held()) is not None and not journey.request.is_killed:
        yield held
    if last is None or journey.request.is_killed:
        return
    if isinstance(last, Exception):
        raise last
    yield last


async def _close(stream: ResponseStream[Item], journey: Journey) -> None:
    """Closes a broken stream. What that raises is about a worker that is given up, and logged."""
    try:
        await stream.aclose()
    except Exception:
        _log.exception("closing a broken stream of request %s failed", journey.request.id)


async def _unless_killed(next: Next, attempt: Context[PreprocessedRequest]) -> ResponseStream[Item]:
    """The stream of the next stage. Raises Cancelled when killed before, whatever that stage waits for."""
    made: list[ResponseStream[Item]] = []

    async def ask() -> AsyncGenerator[None, None]:
        made.append(await next.generate(attempt))
        yield

    try:
        async with aclosing(until_killed(ask(), attempt)) as asked:
            async for _ in asked:
                break
        if made and not attempt.is_killed:
            return made.pop()
    finally:
        for stream in made:  # it came, but so did the kill, or the end of this task
            await stream.aclose()
    raise Cancelled(f"request {attempt.id} was killed before another worker took it")
