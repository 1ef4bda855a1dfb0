"""Items of a stream -> OpenAI chunks, as the bytes of server-sent events.

Only the text is encoded per token: the bytes around it in the event are rendered once per choice.

Source: dynamo lib/llm/src/protocols/openai/{chat_completions,completions}/delta.rs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pipeline.protocols import BackendOutput
from pipeline.protocols.openai import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
)
from pipeline.wire import to_plain

from .form import PLACE, AnswerForm, UsageCount, around, encode, event


class Chunks(ABC):
    """Renders the items of one answer."""

    __slots__ = ("_around", "_choices_per_prompt", "_plain", "_usage", "form")

    def __init__(self, form: AnswerForm, usage: UsageCount) -> None:
        self.form = form
        self._usage = usage
        # Only without these do chunks differ in nothing but their text.
        self._plain = not (form.continuous_usage or form.logprobs or form.extra_fields)
        self._choices_per_prompt = form.choices_per_prompt
        self._around: dict[int, tuple[bytes, bytes] | None] = {}
        """By choice that has begun: the bytes around its text; None if they change."""

    def frame(self, output: BackendOutput, prompt: int = 0) -> bytes | None:
        """Return the event of one item, None if there is nothing to show, as for half a character."""
        index = prompt * self._choices_per_prompt + (output.index or 0)
        if self._plain and output.finish_reason is None:
            if not (text := output.text):
                return None
            if (around_text := self._around.get(index)) is not None:
                return around_text[0] + encode(text) + around_text[1]
        return self._whole(output, index)

    def usage_frame(self) -> bytes:
        """Return the event after the last chunk, with the usage and no choices."""
        return event(to_plain(self._chunk([])) | {"usage": to_plain(self._usage.total())})

    def _whole(self, output: BackendOutput, index: int) -> bytes | None:
        """Return the event of the whole record: a choice's first and last chunk, and chunks with more than text."""
        nvext = self.form.nvext(output)
        shows_logprobs = self.form.logprobs is not None and bool(output.log_probs)
        if not (output.text or output.finish_reason or nvext or shows_logprobs):
            return None
        is_first = index not in self._around
        plain = self._finished(self._chunk([self._choice(output, index, first=is_first)]))
        if is_first:
            text_chunk = self._finished(self._chunk([self._text_choice(index)])) if self._plain else None
            self._around[index] = None if text_chunk is None else around(text_chunk)
        return event(plain if nvext is None else plain | {"nvext": to_plain(nvext)})

    def _finished(self, chunk: ChatCompletionChunk | Completion) -> dict[str, Any]:
        """Return the chunk as a plain value, with the key `usage` only if the request wants usage."""
        plain: dict[str, Any] = to_plain(chunk)
        if not self.form.include_usage:
            del plain["usage"]
        elif self.form.continuous_usage:
            plain["usage"] = to_plain(self._usage.total())
        return plain

    @abstractmethod
    def _chunk(self, choices: list[Any]) -> ChatCompletionChunk | Completion:
        """Return a chunk of these choices."""

    @abstractmethod
    def _text_choice(self, index: int) -> ChatChunkChoice | CompletionChoice:
        """Return a later choice with only `PLACE` as its text."""

    @abstractmethod
    def _choice(self, output: BackendOutput, index: int, *, first: bool) -> ChatChunkChoice | CompletionChoice:
        """Return the item as a choice."""


class ChatChunks(Chunks):
    """Chunks of a chat; the role comes with the first one of each choice."""

    __slots__ = ()

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.form.id, self.form.created, self.form.model, choices)

    def _text_choice(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=PLACE))

    def _choice(self, output: BackendOutput, index: int, *, first: bool) -> ChatChunkChoice:
        reason = output.finish_reason
        return ChatChunkChoice(
            index,
            ChatDelta("assistant" if first else None, output.text or ("" if first else None)),
            None if reason is None else reason.openai_completion,
            None if self.form.logprobs is None else self.form.logprobs.chat(output),
        )


class CompletionChunks(Chunks):
    """Chunks of a text completion."""

    __slots__ = ("_offsets",)

    def __init__(self, form: AnswerForm, usage: UsageCount) -> None:
        super().__init__(form, usage)
        self._offsets: dict[int, int] = {}

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(self.form.id, self.form.created, self.form.model, choices)

    def _text_choice(self, index: int) -> CompletionChoice:
        return CompletionChoice(PLACE, index)

    def _choice(self, output: BackendOutput, index: int, *, first: bool) -> CompletionChoice:
        reason, text, logprobs = output.finish_reason, output.text or "", None
        if self.form.logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs = self.form.logprobs.completion(output, offset)
            self._offsets[index] = offset + len(text)
        return CompletionChoice(text, index, logprobs, None if reason is None else reason.openai_completion)
