"""Delivery: what becomes of the items of an answer: frames that leave at once, or one answer at the end."""

from __future__ import annotations

from typing import Any, Protocol

from pipeline import Annotated
from pipeline.protocols import BackendOutput
from pipeline.sse import encode

from ..openai import Answer, Chunks
from .event_writer import EventWriter


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
    """One answer; annotations are for streams only."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def room(self) -> None:
        return

    def begin(self) -> None:
        return

    def take(self, output: BackendOutput, prompt: int) -> bool:
        self._answer.add(output, prompt)
        return False

    def annotate(self, item: Annotated[Any]) -> bool:
        return False
