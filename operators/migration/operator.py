"""Migration: a broken stream goes on with another worker, and nothing is repeated."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import anyio

from pipeline import Cancelled, Context, InvalidArgument, Operator, ResponseStream
from pipeline.protocols import PreprocessedRequest
from pipeline.telemetry import annotate

from .attempts import Attempts, Next
from .metrics import MigrationMetrics
from .policy import Item, is_migratable, restriction

U = TypeVar("U")

LIMIT_MAX = 2**32 - 1

_log = logging.getLogger(__name__)


class Migration(Operator[PreprocessedRequest, Item, PreprocessedRequest, Item]):
    """Sends a request whose worker fails to another one, which goes on behind the tokens the caller has.

        request ──► as it is; after a failure with the delivered tokens as the end of its prompt ──►
        stream  ◄── of the first worker, then of the next one; each token once, in order         ◄──

    Stands below Preprocess, and above Detokenize, so that each worker's tokens are decoded behind those before; above
    PrefillRouter, so that prefill is repeated with the rest; and above the router, which does not send a request back
    to a worker it has failed on. Takes the items of Detokenize and those of engines.

    Which errors count is in `pipeline.errors`. A request does not migrate if it names its worker, wants several choices
    or a guided form, or has a prompt of embeddings.

    To the next worker the rest is a new request: it costs a prefill, sampling with a seed begins anew, and penalties
    count the delivered tokens as prompt. Usage and cumulative log probabilities are those of the whole answer. An
    answer that broke after its last token ends with `length`.

    If no other worker can go on, `generate` raises the last error; a stream ends with the error that broke it, in the
    form it came in, with the reason why no worker could go on as the last of its causes. A request that is stopped does
    not migrate: `generate` raises Cancelled, a broken stream ends with a `cancelled` item, also during the search for
    another worker. A kill ends it at once. A broken stream is closed before the request is sent again.

    limit: how many more workers one request may be sent to; 0 for none
    max_seq_len_tokens: the length, prompt and delivered tokens together, up to which requests migrate; None for any
    metrics: by default those of the global meter
    tracer: makes the span of each further attempt; by default the global one

    Source: dynamo lib/llm/src/migration.rs, Migration and RetryManager. Differences are listed in `docs/migration.md`.
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
        attempts = Attempts(
            request, next, self._limit + 1, self._max_seq_len_tokens, self._metrics, tracer=self._tracer
        )
        stream = await attempts.next_stream()
        attempts.check_length()
        return ResponseStream(_continued(attempts, stream), request, stream, relay=attempts.relay)

    def _log_restriction(self, request: Context[PreprocessedRequest], reason: str) -> None:
        """Warn of the first request with this reason only: its client will send more of the kind."""
        level = logging.DEBUG if reason in self._warned else logging.WARNING
        self._warned.add(reason)
        _log.log(level, "request %s will not migrate: %s", request.id, reason)

    async def _only_stream(self, request: Context[PreprocessedRequest], next: Next) -> ResponseStream[Item]:
        """Return the stream of the one worker a request may be sent to. A refusal is counted like any last attempt."""
        if request.is_stopped:
            raise Cancelled(f"request {request.id} was stopped before a worker took it")
        try:
            return await next.generate(request)
        except Exception as error:
            if is_migratable(request.payload, error):
                self._metrics.count(request.payload.model, "new_request")
                self._metrics.searched(request.payload.model, "new_request", anyio.current_time(), "failure")
            raise


async def _continued(attempts: Attempts, stream: ResponseStream[Item]) -> AsyncGenerator[Item, None]:
    """The items of one stream after the other, until one ends by itself or no worker can go on."""
    delivered, kind = attempts.delivered, attempts.kind
    following: ResponseStream[Item] | None = stream
    try:
        while following is not None:
            stream = following
            broke: Item | Exception | None = None
            try:
                # Once per token. What only matters after a break is found out then.
                async for item in stream:
                    if item.error is not None:
                        broke = item
                        break
                    if (data := item.data) is not None:
                        if data.__class__ is not kind:
                            kind = attempts.check_kind(data)
                        if token_ids := data.token_ids:
                            delivered += token_ids
                            attempts.last = data
                            if data.worker_trace_link is not None:
                                attempts.link = data.worker_trace_link
                        else:
                            attempts.note(data)
                    yield item
            except Exception as error:
                broke = error
            following = None if broke is None else await attempts.resume(broke, stream)
    finally:
        attempts.check_length()
        await stream.aclose()
    for item in attempts.last_items():
        yield item
