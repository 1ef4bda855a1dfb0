"""Items of a stream -> one whole OpenAI answer.

Each item is encoded when it arrives: encoding an answer of a million tokens, or of thousands with their log
probabilities, at its end would be one long pause for every other stream.

Source: dynamo lib/llm/src/protocols/openai/{chat_completions,completions}/aggregator.rs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from attrs import define, field

from pipeline.protocols import BackendOutput, FinishReason
from pipeline.protocols.openai import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    NvExtResponse,
    ResponseMessage,
)
from pipeline.wire import to_json

from .form import AnswerForm, LogprobForm, UsageCount

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
        self._length = 0
        self._finish_reason: FinishReason | None = None

    def add(self, output: BackendOutput, logprobs: LogprobForm | None) -> None:
        """Add one item, with its log probabilities in that form."""
        if output.finish_reason is not None:
            self._finish_reason = output.finish_reason
        if logprobs is not None:
            self._add_logprobs(output, logprobs)
        if output.text:
            self._text += to_json(output.text)[1:-1]
            self._length += len(output.text)

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
        self._logprobs = {name: _JsonList() for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}

    def json_parts(self) -> list[Part]:
        frame = CompletionChoice("", self._index, None, self._reason)
        places = [(b'"text":"', b'"', [self._text])]
        if self._has_logprobs:
            frame.logprobs = CompletionLogprobs()
            places += [(b'"%b":[' % name.encode(), b"]", [known.json]) for name, known in self._logprobs.items()]
        return _filled(to_json(frame), places)

    def _add_logprobs(self, output: BackendOutput, form: LogprobForm) -> None:
        if (found := form.completion(output, self._length)) is not None:
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
