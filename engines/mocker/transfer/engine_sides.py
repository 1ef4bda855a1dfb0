"""The two sides of a KV transfer, on the ranks of the mock engine.

prefill worker   queue ─ compute ─ hold ──── chunk with the token ──── blocks fetched ─ release ─ last chunk
decode worker    reserve room ─────────────── blocks on their way ──── activate ─ tokens
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pipeline import Cancelled, InvalidArgument
from pipeline.protocols import LLMEngineOutput

from ..answer import REJECTED, Answer
from .exchange import TransferExchange
from .sides import TransferKey, TransferTiming


class Sender:
    """The prefill worker's side of one request; see `SourceSide`."""

    def __init__(self, answer: Answer, timing: TransferTiming) -> None:
        self._answer, self._timing = answer, timing

    def submit(self) -> None:
        self._answer.begin(holds_blocks=True)

    async def hold(self) -> TransferTiming:
        await self._answer.finished()
        return self._timing

    def release(self) -> None:
        self._answer.release()

    def cancel(self) -> None:
        self._answer.close()


class Receiver:
    """The decode worker's side of one request; see `DestinationSide`."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def reserve(self) -> int:
        answer, (sequence, *others) = self._answer, self._answer.sequences
        if others:
            raise InvalidArgument("transferred blocks serve one choice", field="n")
        if answer.rank.scheduler.rejects(sequence):
            raise InvalidArgument(REJECTED)
        await answer.rank.reserve(sequence)
        return sequence.prompt_tokens - (sequence.cached_tokens or 0)

    def activate(self) -> None:
        (sequence,) = self._answer.sequences
        self._answer.rank.activate(sequence, self._answer.channel)

    def cancel(self) -> None:
        self._answer.close()


async def send_blocks(
    answer: Answer, exchange: TransferExchange, key: TransferKey, timing: TransferTiming
) -> AsyncGenerator[LLMEngineOutput, None]:
    """Yield a prefill's chunk as soon as its blocks are held, and its last one when the decode worker has them."""
    try:
        async with (
            exchange.source(key, Sender(answer, timing), answer.control) as endpoint,
            aclosing(answer.chunks()) as chunks,
        ):
            await endpoint.held()
            yield await anext(chunks)
            await endpoint.done()
            async for chunk in chunks:
                yield chunk
    except Cancelled:
        if not answer.control.is_stopped:
            raise
        if not answer.control.is_killed:
            yield answer.cancelled()


async def receive_blocks(
    answer: Answer, exchange: TransferExchange, key: TransferKey
) -> AsyncGenerator[LLMEngineOutput, None]:
    """Yield an answer that begins when the prefill worker's blocks have arrived."""
    try:
        async with (
            exchange.destination(key, Receiver(answer), answer.control) as endpoint,
            aclosing(answer.chunks()) as chunks,
        ):
            await endpoint.done()
            async for chunk in chunks:
                yield chunk
    except Cancelled:
        if not answer.control.is_stopped:
            raise
        if not answer.control.is_killed:
            yield answer.cancelled()
