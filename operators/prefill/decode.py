"""The stream of decode, watched where its blocks come from a prefill that still runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pipeline import Annotated, AsyncEngine, Cancelled, Context, PenstockError, ReleaseOnce, ResponseStream
from pipeline.errors import Refused, chain, may_migrate
from pipeline.protocols import PreprocessedRequest
from pipeline.protocols.openai import BYPASS_REMOTE_PREFILL
from pipeline.telemetry import spanned

from ..pool import Output
from .transfer import Handover


async def fed(
    request: Context[PreprocessedRequest],
    payload: PreprocessedRequest,
    handover: Handover,
    next: AsyncEngine[PreprocessedRequest, Output],
) -> ResponseStream[Output]:
    """Decode's stream. Where it may wait for blocks in vain it runs in a child, which the hand-over may kill.

    Raises what decode raises, and the prefill's error where it was killed for that, or failed for want of its blocks.
    """
    if handover.is_over:
        return await decode_in_span(request.with_payload(payload), handover, next)
    below = request.child(payload)
    handover.feeds(below.control)
    try:
        stream = await decode_in_span(below, handover, next)
    except BaseException as error:
        try:
            reason = await _reason(request, handover, error) if isinstance(error, Exception) else None
        finally:
            handover.abandon()
        if reason is not None:
            raise reason from reason.__cause__
        raise
    left = ReleaseOnce(handover.abandon)
    return ResponseStream(_watched(stream, request, handover, left), request, stream, left)


async def decode_in_span(
    request: Context[PreprocessedRequest], handover: Handover, next: AsyncEngine[PreprocessedRequest, Output]
) -> ResponseStream[Output]:
    """Decode's stream, if the request is traced in a span that is linked to the one of the prefill."""
    if request.trace is None:
        return await next.generate(request)
    return await spanned(request, "decode", next.generate, tracer=handover.tracer, link=handover.link)


async def _watched(
    stream: ResponseStream[Output], request: Context[Any], handover: Handover, left: ReleaseOnce
) -> AsyncGenerator[Output, None]:
    reason: PenstockError | None = None
    has_failed = False
    try:
        async with stream:
            async for item in stream:
                # An event says nothing of blocks.
                if not handover.is_settled and (item.data is not None or item.is_error):
                    if (reason := await _reason(request, handover, item.extract_error())) is not None:
                        break
                    handover.settle()
                has_failed = item.is_error
                yield item
        if reason is None and not has_failed:
            handover.leave()
    except Exception as error:
        reason = await _reason(request, handover, error)
        if reason is None:
            raise
    finally:
        left.release()
    if reason is None and handover.starves:
        reason = await _reason(request, handover, None)
    if reason is not None:
        raise reason from reason.__cause__


async def _reason(request: Context[Any], handover: Handover, error: Exception | None) -> PenstockError | None:
    """The prefill's error, if decode ended, perhaps with an error, for that and not because the caller wanted it.

    Who waits for blocks may know earlier than we do that they will not come: an error that says nothing else waits for
    the end of the prefill.
    """
    if request.is_stopped:
        return None
    if not handover.starves:
        if handover.is_settled or error is None or may_migrate(error) or _is_final(error):
            return None
        await handover.fails_soon()
    return None if request.is_stopped else handover.error


def _is_final(error: Exception) -> bool:
    """Whether it is about the request, or about who may have it, and so not about blocks."""
    return any(isinstance(link, Cancelled | Refused) or _is_shown(link) for link in chain(error))


def _is_shown(link: BaseException) -> bool:
    return isinstance(link, PenstockError) and link.facts.shown


def announced(request: Context[Any], stream: ResponseStream[Output]) -> ResponseStream[Output]:
    """The stream behind an event that says nobody else prefills."""
    return ResponseStream(_announced(stream), request, stream)


async def _announced(stream: ResponseStream[Output]) -> AsyncGenerator[Output, None]:
    async with stream:
        if not stream.context.is_stopped:
            yield Annotated[Any].from_annotation(BYPASS_REMOTE_PREFILL, True)
        async for item in stream:
            yield item
