"""The stream of decode, watched while its blocks come from a prefill that still runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pipeline import AsyncEngine, Cancelled, Context, PenstockError, ReleaseOnce, ResponseStream
from pipeline.errors import Refused, chain, may_migrate
from pipeline.protocols import PreprocessedRequest
from pipeline.telemetry import spanned

from ..pool import Output
from .task import DecodeState, PrefillTask


async def decode_stream(
    request: Context[PreprocessedRequest],
    payload: PreprocessedRequest,
    prefill: PrefillTask,
    next: AsyncEngine[PreprocessedRequest, Output],
) -> ResponseStream[Output]:
    """Return decode's stream. Where it may wait for blocks in vain it runs in a child, which the prefill may kill.

    Raise what decode raises, and the prefill's error where decode was killed for that, or failed for want of blocks.
    """
    if prefill.is_done:
        return await decode_in_span(request.with_payload(payload), prefill, next)
    below = request.child(payload)
    prefill.decode_sent(below.control)
    try:
        stream = await decode_in_span(below, prefill, next)
    except BaseException as error:
        try:
            reason = await _prefill_error(request, prefill, error) if isinstance(error, Exception) else None
        finally:
            prefill.abandon()
        if reason is not None:
            raise reason from reason.__cause__
        raise
    left = ReleaseOnce(prefill.abandon)
    return ResponseStream(_watched(stream, request, prefill, left), request, stream, left)


async def decode_in_span(
    request: Context[PreprocessedRequest], prefill: PrefillTask, next: AsyncEngine[PreprocessedRequest, Output]
) -> ResponseStream[Output]:
    """Return decode's stream, for a traced request in a span that is linked to the span of the prefill."""
    if request.trace is None:
        return await next.generate(request)
    return await spanned(request, "decode", next.generate, tracer=prefill.tracer, link=prefill.link)


async def _watched(
    stream: ResponseStream[Output], request: Context[Any], prefill: PrefillTask, left: ReleaseOnce
) -> AsyncGenerator[Output, None]:
    reason: PenstockError | None = None
    has_failed = False
    try:
        async with stream:
            async for item in stream:
                # An event is no sign that the blocks are there.
                if not prefill.is_settled and (item.data is not None or item.is_error):
                    if (reason := await _prefill_error(request, prefill, item.extract_error())) is not None:
                        break
                    prefill.decode_moves(DecodeState.SETTLED)
                has_failed = item.is_error
                yield item
        if reason is None and not has_failed:
            prefill.decode_moves(DecodeState.ENDED)
    except Exception as error:
        reason = await _prefill_error(request, prefill, error)
        if reason is None:
            raise
    finally:
        left.release()
    if reason is None and prefill.starved_decode:
        reason = await _prefill_error(request, prefill, None)
    if reason is not None:
        raise reason from reason.__cause__


async def _prefill_error(request: Context[Any], prefill: PrefillTask, error: Exception | None) -> PenstockError | None:
    """Return the prefill's error, if decode ended, perhaps with an error, because of it; None if the client left.

    Decode may know earlier than the router that its blocks will not come: an error that could be for want of blocks
    waits for the end of the prefill.
    """
    if request.is_stopped:
        return None
    if not prefill.starved_decode:
        if prefill.is_settled or error is None or may_migrate(error) or _is_final(error):
            return None
        await prefill.fails_soon()
    return None if request.is_stopped else prefill.error


def _is_final(error: Exception) -> bool:
    """Whether the error is about the request, or refuses it, and so is not for want of blocks."""
    return any(
        isinstance(link, Cancelled | Refused) or (isinstance(link, PenstockError) and link.facts.shown)
        for link in chain(error)
    )
