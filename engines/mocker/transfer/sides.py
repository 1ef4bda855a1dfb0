"""The sides of the mock engine's requests in a transfer, on their ranks.

prefill worker   queue ─ compute ─ hold ──── chunk with the token ──── blocks fetched ─ release ─ last chunk
decode worker    reserve room ─────────────── blocks on their way ──── activate ─ tokens
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pipeline import Cancelled, InvalidArgument
from pipeline.protocols import LLMEngineOutput

from ..answer import Answer
from ..rank import REJECTED
from .across import PeerDestination
from .protocol import TransferTiming
from .session import DestinationEndpoint, SourceEndpoint


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


async def transferred(
    answer: Answer, endpoint: SourceEndpoint | DestinationEndpoint | PeerDestination
) -> AsyncGenerator[LLMEngineOutput, None]:
    """Yield an answer by its side of a transfer.

    A prefill's chunk comes as soon as its blocks are held, and its last one when the decode worker has them; an answer
    of a decode worker begins when the blocks have arrived.
    """
    try:
        async with endpoint, aclosing(answer.chunks()) as chunks:
            if isinstance(endpoint, SourceEndpoint):
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
