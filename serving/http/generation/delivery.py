"""Delivery: what becomes of the items of an answer: frames that leave at once, or one answer at the end."""

from __future__ import annotations

from math import inf
from typing import Any, Protocol

from pipeline import Annotated
from pipeline.errors import ExceededLimit
from pipeline.protocols import BackendOutput
from pipeline.wire import encode

from ...openai import Answer, Chunks
from ..problems import Refusal
from .event_writer import EventWriter

_ITEM_BYTES = 40
"""What an item takes in an answer beside its text, with the id of its token, which may be asked for."""

_CANDIDATE_BYTES = 128
"""What a token or candidate with its log probability takes (measured: 75 to 115 for a short one)."""


class Delivery(Protocol):
    """Takes the items of all prompts of one request."""

    async def room(self) -> None:
        """Waits until there is room."""

    def begin(self) -> None:
        """One more prompt has its first item, and it is no error."""

    def take(self, output: BackendOutput, prompt: int) -> bool:
        """Takes an item of that prompt; whether `room` has to be awaited before the next one."""
        ...

    def annotate(self, item: Annotated[Any]) -> bool:
        """Takes the events and comments of an item, without its data; returns as `take`."""
        ...


class StreamDelivery:
    """Frames through a writer, which begins once no prompt can fail with a status any more."""

    __slots__ = ("_chunks", "_not_begun", "_writer")

    def __init__(self, writer: EventWriter, chunks: Chunks, prompts: int) -> None:
        self._writer = writer
        self._chunks = chunks
        self._not_begun = prompts

    async def room(self) -> None:
        await self._writer.room()

    def begin(self) -> None:
        self._not_begun -= 1
        if self._not_begun == 0:
            self._writer.commit()

    def take(self, output: BackendOutput, prompt: int) -> bool:
        frame = self._chunks.frame(output, prompt)
        return frame is not None and self._writer.put(frame)

    def annotate(self, item: Annotated[Any]) -> bool:
        frame = encode(item.transfer(None))
        return frame is not None and self._writer.put(frame)


class WholeDelivery:
    """One answer, of at most `limit_bytes` as it is held (0: no limit); annotations are for streams only.

    `take` raises Refusal (400) for what goes beyond.
    """

    def __init__(self, answer: Answer, limit_bytes: int = 0) -> None:
        self._answer = answer
        self._limit_bytes = limit_bytes or inf
        self._held_bytes = 0

    async def room(self) -> None:
        return

    def begin(self) -> None:
        return

    def take(self, output: BackendOutput, prompt: int) -> bool:
        self._held_bytes += _ITEM_BYTES + len(output.text or "")
        if output.top_logprobs is not None or output.log_probs is not None:
            positions = output.top_logprobs or ()
            self._held_bytes += _CANDIDATE_BYTES * sum(1 + len(candidates) for candidates in positions)
            self._held_bytes += _CANDIDATE_BYTES * len(output.log_probs or ())
        if self._held_bytes > self._limit_bytes:
            limit = ExceededLimit("max_whole_answer_bytes", self._held_bytes, self._limit_bytes)
            raise Refusal(400, "The answer is too long for one piece: ask for a stream", "validation", exceeded=limit)
        self._answer.add(output, prompt)
        return False

    def annotate(self, item: Annotated[Any]) -> bool:
        return False
