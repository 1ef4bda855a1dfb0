"""RequestAdapter: an LLMEngine as an AsyncEngine, with everything one request needs around its chunks.

    request ──► role's checks ──► span ──► engine.generate
    items   ◄── first token, contract, errors ◄── chunks          stop, kill ──► abort

Source: dynamo lib/backend-common/src/adapter.rs and engine.rs. Other than there the contract is enforced in
production too: a breach becomes a typed error.

AbortWatch calls `abort` at most once; other than there it is no task:

| role                 | what happens                        | abort                             |
|----------------------|-------------------------------------|-----------------------------------|
| any                  | the stream ends, or is dropped      | never                             |
| all but decode       | stop or kill                        | at once                           |
| decode, token seen   | stop or kill                        | at once                           |
| decode, none so far  | stop or kill                        | when the first token fires        |
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from inspect import isasyncgen, isawaitable
from typing import Any, cast

from attrs import evolve

from pipeline import (
    KILLED,
    Annotated,
    AsyncEngine,
    Context,
    ContractViolation,
    Control,
    Gate,
    PenstockError,
    ReleaseOnce,
    ResponseStream,
    Take,
    unless_killed,
    until_killed,
)
from pipeline.foreign import raise_if_ours
from pipeline.loop import clock
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest
from pipeline.telemetry import OpenSpan, Tracer, annotate, link_to, trace_link

from .chunks import ChunkContract, GenerateRecord, engine_error, is_cancellation
from .llm import Chunks, FirstToken, GenerateContext, LLMEngine
from .roles import DisaggregationMode, enforce_prefill_max_tokens, is_prefilled_elsewhere, require_prefill


class AbortWatch:
    """Watches one request from `begin` to `end`."""

    __slots__ = ("_abort", "_first_token", "_forget", "_is_over")

    def __init__(self, first_token: FirstToken | None, abort: Callable[[], object]) -> None:
        self._first_token = first_token
        self._abort = abort
        self._forget: Callable[[], None] | None = None
        self._is_over = False

    def begin(self, control: Control) -> None:
        self._forget = control.on_stop(self._stopped)

    def end(self) -> None:
        """The stream is over: no abort from here on."""
        self._is_over = True
        if self._forget is not None:
            self._forget()

    def _stopped(self) -> None:
        if self._first_token is None:
            self._call()
        else:
            self._first_token.on_fire(self._call)

    def _call(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._abort()


_log = logging.getLogger(__name__)

SPAN = "engine.generate"
Source = AsyncGenerator[LLMEngineOutput, None]
Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]
"""Runs a coroutine function in the background."""


class RequestAdapter(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    """Serves requests with a started engine, which it neither starts nor cleans up.

    A chunk becomes a data item, an error of the engine an error item that ends the stream; an error before there are
    chunks goes to the caller. On the first chunk with tokens the first token is signalled and the chunk is stamped with
    the span. Nothing is read after the terminal chunk. After a stop the stream ends with a cancelled chunk, made here
    if the engine just ends; after a kill it ends at once, without one. `spawn` runs the calls of `abort`; without it
    there are none. `may_prefill` lets a decode worker accept requests without a prefill. `details` adds times and
    counts to the span, at some cost for each chunk; `tracer` makes the span, by default that of the process.
    """

    def __init__(
        self,
        engine: LLMEngine,
        *,
        mode: DisaggregationMode = DisaggregationMode.AGGREGATED,
        model: str = "",
        spawn: Spawn | None = None,
        may_prefill: bool = False,
        details: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self.engine = engine
        self.mode = mode
        self.model = model
        self._requires_prefill = mode is DisaggregationMode.DECODE and not may_prefill
        self._details = details
        self.tracer = tracer
        overrides_abort = type(engine).abort is not LLMEngine.abort
        self._spawn = spawn if overrides_abort else None

    @property
    def name(self) -> str:
        return self._name or type(self.engine).__name__

    def __str__(self) -> str:
        return self.name

    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        payload = self._prepared(request.payload)
        call = _Call(self, request, payload)
        try:
            made = self.engine.generate(payload, call.context)
            chunks = await unless_killed(made, request) if isawaitable(made) else made
        except BaseException as error:
            raised = call.refused(error)
            raise raised from raised.__cause__
        call.begin()
        call.ended = ReleaseOnce(call.end)
        return _Adapted(self._items(chunks, call), call)

    def _prepared(self, payload: PreprocessedRequest) -> PreprocessedRequest:
        """Return the request as this role's engine receives it. Raises InvalidArgument for one of another role."""
        if self.mode is DisaggregationMode.PREFILL:
            return enforce_prefill_max_tokens(payload)
        if self._requires_prefill:
            require_prefill(payload)
        return payload

    async def _items(self, chunks: Chunks, call: _Call) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
        control, context = call.request.control, call.context
        engine_ends = self.engine.ends_on_kill and isasyncgen(chunks)
        source = cast(Source, chunks) if engine_ends else until_killed(chunks, call.request)
        try:
            async for chunk in source:
                if control.state is KILLED:
                    return
                # Nearly every chunk comes this way: an ordinary one of the only choice.
                if (
                    context.is_steady
                    and type(chunk) is LLMEngineOutput
                    and chunk.finish_reason is None
                    and not chunk.index
                ):
                    yield Annotated(chunk)
                    continue
                admitted, is_last = call.admit(chunk)
                yield Annotated(admitted)
                if is_last:
                    return
            if not control.is_killed and (last := call.cut_short()) is not None:
                yield Annotated(last)
        except BaseException as error:
            item = call.failed(error)
            await self._close(source, call)  # what the request held is free before the caller sees the error
            if item is not None:
                yield item
        finally:
            try:
                await self._close(source, call)
            finally:
                call.ended.release()

    async def _close(self, source: Source, call: _Call) -> None:
        """Close the engine's generator. What it raises then comes too late for the reader, and is logged."""
        try:
            await source.aclose()
        except BaseException as error:
            raise_if_ours(error)
            _log.exception("closing the chunks of request %r failed", call.request.id)

    def record(self, payload: PreprocessedRequest) -> GenerateRecord | None:
        """Return a record for the details of one request, or None if there are none."""
        if not self._details:
            return None
        return GenerateRecord(payload, self.mode.display, self.model, clock())

    def abort_watch(self, first_token: FirstToken | None, context: GenerateContext) -> AbortWatch | None:
        """Return the watch that calls abort for one request, or None if the engine has no abort."""
        if (spawn := self._spawn) is None:
            return None
        return AbortWatch(first_token, lambda: spawn(lambda: self._abort(context)))

    async def _abort(self, context: GenerateContext) -> None:
        """Call the engine's abort; log what it raises."""
        try:
            await self.engine.abort(context)
        except BaseException as error:
            raise_if_ours(error)
            _log.exception("abort of request %r failed", context.id)


class _Adapted(ResponseStream[Annotated[LLMEngineOutput]]):
    """The items of a request. Tokens that the engine offers are fed: see `GenerateContext.offer_token`."""

    __slots__ = ("_call",)

    def __init__(self, items: AsyncGenerator[Annotated[LLMEngineOutput], None], call: _Call) -> None:
        super().__init__(items, call.caller, call.ended)
        self._call = call

    def feed(self, take: Take, gate: Gate) -> bool:
        """See `ResponseStream`."""
        self._call.context.feed(take, gate)
        return True


class _Call:
    """One request under way: its contexts, its span, its abort, and its progress."""

    ended: ReleaseOnce

    def __init__(
        self, adapter: RequestAdapter, request: Context[PreprocessedRequest], payload: PreprocessedRequest
    ) -> None:
        self.caller = request
        self._span = OpenSpan(request, SPAN, tracer=adapter.tracer)
        self.request = self._span.context
        self._engine = adapter.engine
        takes_blocks = adapter.mode is DisaggregationMode.DECODE and is_prefilled_elsewhere(payload)
        first_token = FirstToken() if takes_blocks else None
        self.context = GenerateContext(self.request, first_token, metadata=request.metadata)
        encodes = adapter.mode is DisaggregationMode.ENCODE
        self._rules = ChunkContract(payload.sampling_options.n or 1, encodes=encodes)
        self._stamps_last = adapter.mode in (DisaggregationMode.PREFILL, DisaggregationMode.ENCODE)
        self._awaits_token = True
        self._is_begun = False
        self._is_complete = False
        self._error: PenstockError | None = None
        self._error_kind: str | None = None
        self._record = adapter.record(payload)
        self._abort = adapter.abort_watch(first_token, self.context)
        if (link := payload.migration_link) is not None:
            annotate(self.request, {"migration.trace_id": link.trace_id, "migration.span_id": link.span_id})
            link_to(self.request, link)

    def begin(self) -> None:
        """Called when the engine has accepted the request: from here on it may be aborted."""
        if self._abort is not None:
            self._abort.begin(self.request.control)

    def admit(self, chunk: LLMEngineOutput) -> tuple[LLMEngineOutput, bool]:
        """Return the chunk to yield, and whether it is the last.

        Raises ContractViolation for a chunk that breaks the contract, and what a stage raised for a token that it took.
        """
        if self.context.take_error is not None:
            raise self.context.take_error
        is_last = self._rules.admit(chunk)
        # Alone it is an answer; behind others it would end half an answer as if that were all of it.
        is_early = self._is_begun and chunk.finish_reason == FinishReason.CANCELLED
        if is_early and not (self.request.is_stopped or self._engine.is_closing):
            raise ContractViolation("L1: the engine gave up an answer that was not stopped", rule="L1")
        self._is_begun = True
        if self._awaits_token and (chunk.token_ids or (is_last and self._stamps_last)):
            self._awaits_token = False
            self.context.notify_first_token()
            if chunk.worker_trace_link is None and (link := trace_link(self.request)) is not None:
                chunk = evolve(chunk, worker_trace_link=link)  # a copy: the engine may yield the same chunk again
        if self._record is not None:
            self._record.observe(chunk)
        self._is_complete = is_last
        self.context.is_steady = self._record is None and not self._awaits_token and self._rules.is_single
        return chunk, is_last

    def cut_short(self) -> LLMEngineOutput | None:
        """Return the chunk to end a stream whose engine just ended. Raises StreamIncomplete unless it was stopped."""
        last = self._rules.cut_short(stopped=self.request.is_stopped)
        return None if last is None else self._last(last)

    def refused(self, error: BaseException) -> PenstockError:
        """Return the error for the caller of a request that the engine refused; the call is over.

        Raises an error that is not the engine's, such as a cancellation of the caller.
        """
        try:
            raise_if_ours(error)
            raised = engine_error(error)
            if not (is_cancellation(raised) and self.request.is_stopped):
                self.fails(raised, kind="setup_failed")
        finally:
            self.end()
        return raised

    def failed(self, error: BaseException) -> Annotated[LLMEngineOutput] | None:
        """Return the item that ends a stream whose engine raised, None after a kill. Raises as `refused`."""
        raise_if_ours(error)
        if self.request.is_killed:
            return None
        raised = engine_error(error)
        if self.request.is_stopped and is_cancellation(raised):
            return Annotated(self._last(LLMEngineOutput.cancelled()))
        self.fails(raised)
        return Annotated.from_error(raised)

    def fails(self, error: PenstockError, kind: str | None = None) -> None:
        self._error, self._error_kind = error, kind or error.type_name

    def end(self) -> None:
        """Called when the stream is over, however it ended."""
        if self._abort is not None:
            self._abort.end()
        stopped = self.request.is_stopped
        dropped = not (self._is_complete or self._error is not None or stopped)
        if self._record is not None:
            cancelled = stopped and (self._rules.is_cancelled or not self._is_complete)
            attributes = self._record.attributes(cancelled=cancelled, dropped=dropped, error_kind=self._error_kind)
            annotate(self.request, attributes)
        if self._error is not None:
            self._span.fails(self._error)
        elif dropped:
            self._span.fails("Dropped")
        self._span.end()

    def _last(self, chunk: LLMEngineOutput) -> LLMEngineOutput:
        """Record a cancelled chunk that the engine has not made."""
        self._is_complete = self._rules.is_cancelled = True
        if self._record is not None:
            self._record.observe(chunk)
        return chunk
