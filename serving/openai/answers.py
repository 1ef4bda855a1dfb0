"""Items of a stream -> the OpenAI answer: chunks, as the bytes of server-sent events, or one whole answer.

Of a chunk only the text is encoded per token: the bytes around it in the event are rendered once per choice. For a
whole answer each item is encoded when it arrives: encoding an answer of a million tokens, or of thousands with their
log probabilities, at its end would be one long pause for every other stream.

Source: dynamo lib/llm/src/protocols/openai/{chat_completions,completions}/{delta,aggregator}.rs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from attrs import define, field

from pipeline.protocols import BackendOutput, FinishReason
from pipeline.protocols.openai import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    NvExtResponse,
    ResponseMessage,
)
from pipeline.wire import to_json, to_plain

from .form import PLACE, AnswerForm, LogprobForm, UsageCount, around, encode, event, text_length

# -- chunks


def token_output(token_id: int, index: int | None, text: str) -> BackendOutput:
    """Return the output of one token and its text, and nothing else."""
    return BackendOutput([token_id], [text or None], text or None, index=index)


class Chunks(ABC):
    """Renders the items of one answer."""

    __slots__ = ("_after", "_around", "_before", "_choices_per_prompt", "_last", "_plain", "_usage", "form")

    def __init__(self, form: AnswerForm, usage: UsageCount) -> None:
        self.form = form
        self._usage = usage
        # Only without these do chunks differ in nothing but their text.
        self._plain = not (form.continuous_usage or form.logprobs or form.extra_fields)
        self._choices_per_prompt = form.choices_per_prompt
        self._around: dict[int, tuple[bytes, bytes] | None] = {}
        """By choice that has begun: the bytes around its text; None before its second text, and if they change."""
        self._last, self._before, self._after = -1, b"", b""
        """The choice of the last text that was put between such bytes, and these bytes. Nearly all have one choice."""

    def frame(self, output: BackendOutput, prompt: int = 0) -> bytes | None:
        """Return the event of one item, None if there is nothing to show, as for half a character."""
        index = prompt * self._choices_per_prompt + (output.index or 0)
        if self._plain and output.finish_reason is None:
            if not (text := output.text):
                return None
            if index in self._around:
                if (around_text := self._around[index]) is None:
                    around_text = around(self._finished(self._chunk([self._text_choice(index)])))
                    self._around[index] = around_text
                self._last, (self._before, self._after) = index, around_text
                return self._before + encode(text) + self._after
        return self._whole(output, index)

    def token_frame(self, token_id: int, index: int | None, text: str, prompt: int) -> bytes | None:
        """Return the event of an item of one token and its text, and nothing else, as `frame` does."""
        if text and self._last == prompt * self._choices_per_prompt + (index or 0):
            return self._before + encode(text) + self._after
        return self.frame(token_output(token_id, index, text), prompt)

    def usage_frame(self) -> bytes:
        """Return the event after the last chunk, with the usage and no choices."""
        return event(to_plain(self._chunk([])) | {"usage": to_plain(self._usage.total())})

    def _whole(self, output: BackendOutput, index: int) -> bytes | None:
        """Return the event of the whole record: a choice's first and last chunk, and chunks with more than text."""
        nvext = None if self._plain else self.form.nvext(output)
        shows_logprobs = self.form.logprobs is not None and bool(output.log_probs)
        if not (output.text or output.finish_reason or nvext or shows_logprobs):
            return None
        is_first = index not in self._around
        plain = self._finished(self._chunk([self._choice(output, index, first=is_first)]))
        if is_first:
            self._around[index] = None
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
            self._offsets[index] = offset + text_length(output)
        return CompletionChoice(text, index, logprobs, None if reason is None else reason.openai_completion)


# -- whole answers

Part = bytes | bytearray


@define
class _JsonList:
    """A JSON list that grows, without its brackets."""

    json: bytearray = field(factory=bytearray)

    def add(self, entries: Sequence[Any]) -> None:
        """Append entries. Raise CodecError if one has no JSON form."""
        if entries:
            self.json += b"," * bool(self.json) + to_json(entries)[1:-1]


def _filled(frame: bytes, places: Iterable[tuple[bytes, bytes, Iterable[Part]]]) -> list[Part]:
    """Return the JSON with parts inserted at places, in order. A place is the texts around it, and the parts.

    Each place is the first match behind the former one. The quotes in these texts keep them from matching in a string.
    """
    whole: list[Part] = []
    for before, behind, parts in places:
        head, _, rest = frame.partition(before + behind)
        whole += [head + before, *(part for part in parts if part)]
        frame = behind + rest
    return [*whole, frame]


class _Choice(ABC):
    """The items of one choice so far."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = bytearray()
        """Its text as JSON, without the quotes."""
        self._finish_reason: FinishReason | None = None

    def add(self, output: BackendOutput, logprobs: LogprobForm | None) -> None:
        """Add one item, with its log probabilities in that form."""
        if output.finish_reason is not None:
            self._finish_reason = output.finish_reason
        if logprobs is not None:
            self._add_logprobs(output, logprobs)
        if output.text:
            self._text += to_json(output.text)[1:-1]

    @property
    def _reason(self) -> Literal["stop", "length", "content_filter"] | None:
        return None if self._finish_reason is None else self._finish_reason.openai_completion

    @abstractmethod
    def json_parts(self) -> list[Part]:
        """Return the choice as JSON, in parts."""

    @abstractmethod
    def _add_logprobs(self, output: BackendOutput, form: LogprobForm) -> None:
        """Add the item's log probabilities. Called before its text is added."""


class _ChatChoice(_Choice):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs = _JsonList()

    def json_parts(self) -> list[Part]:
        frame = ChatChoice(self._index, ResponseMessage(content=""), self._reason)
        places = [(b'"content":"', b'"', [self._text])]
        if self._logprobs.json:
            frame.logprobs = ChatLogprobs([])
            places.append((b'"content":[', b"]", [self._logprobs.json]))
        return _filled(to_json(frame), places)

    def _add_logprobs(self, output: BackendOutput, form: LogprobForm) -> None:
        found = form.chat(output)
        if found is not None and found.content:
            self._logprobs.add(found.content)


class _CompletionChoice(_Choice):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._has_logprobs = False
        self._offset = 0
        self._logprobs = {name: _JsonList() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}

    def json_parts(self) -> list[Part]:
        frame = CompletionChoice("", self._index, None, self._reason)
        places = [(b'"text":"', b'"', [self._text])]
        if self._has_logprobs:
            frame.logprobs = CompletionLogprobs()
            places += [(b'"%b":[' % name.encode(), b"]", [known.json]) for name, known in self._logprobs.items()]
        return _filled(to_json(frame), places)

    def _add_logprobs(self, output: BackendOutput, form: LogprobForm) -> None:
        found = form.completion(output, self._offset)
        self._offset += text_length(output)
        if found is not None:
            self._has_logprobs = True
            for name, known in self._logprobs.items():
                known.add(getattr(found, name))


class Answer(ABC):
    """Collects the items of one answer."""

    _choice: ClassVar[type[_Choice]]

    def __init__(self, form: AnswerForm, usage: UsageCount) -> None:
        self.form = form
        self._usage = usage
        self._choices: dict[int, _Choice] = {}
        self._nvext: NvExtResponse | None = None
        self._token_ids: list[int] = []

    def add(self, output: BackendOutput, prompt: int = 0) -> None:
        """Add one item of that prompt's stream. Raise CodecError if it has no JSON form."""
        index = self.form.index(output, prompt)
        if (choice := self._choices.get(index)) is None:
            choice = self._choices[index] = self._choice(index)
        choice.add(output, self.form.logprobs)
        if (nvext := self.form.nvext(output)) is not None:
            self._add_nvext(nvext)

    def _add_nvext(self, nvext: NvExtResponse) -> None:
        """Add the extension fields of an item. Token ids are collected apart: each join would take longer."""
        self._token_ids += nvext.completion_token_ids or ()
        nvext.completion_token_ids = None
        self._nvext = nvext if self._nvext is None else self._nvext.merge(nvext)

    def json_parts(self) -> list[Part]:
        """Return the whole answer in parts, choices by index."""
        choices: list[Part] = []
        for _, choice in sorted(self._choices.items()):
            choices += [b",", *choice.json_parts()]
        answer = self._frame()
        answer.usage, answer.nvext = self._usage.total(), self._nvext
        if answer.nvext is not None:
            answer.nvext.completion_token_ids = self._token_ids or None
        return _filled(to_json(answer), [(b'"choices":[', b"]", choices[1:])])

    @abstractmethod
    def _frame(self) -> ChatCompletion | Completion:
        """Return the record without its choices."""


class ChatAnswer(Answer):
    """A whole chat answer."""

    _choice = _ChatChoice

    def _frame(self) -> ChatCompletion:
        return ChatCompletion(self.form.id, self.form.created, self.form.model, [])


class CompletionAnswer(Answer):
    """A whole text completion."""

    _choice = _CompletionChoice

    def _frame(self) -> Completion:
        return Completion(self.form.id, self.form.created, self.form.model, [])
