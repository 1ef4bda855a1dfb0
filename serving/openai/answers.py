"""Items of a stream -> one whole OpenAI answer.

Source: dynamo lib/llm/src/protocols/openai/{chat_completions,completions}/aggregator.rs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from attrs import define, field

from pipeline.codec import to_json
from pipeline.protocols import BackendOutput, FinishReason, NvExtResponse
from pipeline.protocols.openai import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChosenLogprob,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ResponseMessage,
)

from .form import AnswerForm
from .usage import UsageCount


@define
class _Choice:
    """What has come of one choice."""

    texts: list[str] = field(factory=list)
    length: int = 0
    finish_reason: FinishReason | None = None
    chat_logprobs: list[ChosenLogprob] = field(factory=list)
    completion_logprobs: CompletionLogprobs | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Answer(ABC):
    """Collects the items of one answer."""

    def __init__(self, form: AnswerForm, usage: UsageCount) -> None:
        self.form = form
        self._usage = usage
        self._choices: dict[int, _Choice] = {}
        self._nvext: NvExtResponse | None = None

    def add(self, output: BackendOutput, prompt: int = 0) -> None:
        """Takes one item of the stream of that prompt."""
        choice = self._choices.setdefault(self.form.index(output, prompt), _Choice())
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason
        if self.form.logprobs is not None:
            self._add_logprobs(choice, output)
        if output.text:
            choice.texts.append(output.text)
            choice.length += len(output.text)
        if (nvext := self.form.nvext(output)) is not None:
            self._nvext = nvext if self._nvext is None else self._nvext.merge(nvext)

    def to_json(self) -> bytes:
        """The whole answer, choices by index."""
        answer = self._answer(sorted(self._choices.items()))
        answer.usage, answer.nvext = self._usage.total(), self._nvext
        return to_json(answer)

    @abstractmethod
    def _add_logprobs(self, choice: _Choice, output: BackendOutput) -> None:
        """Takes the item's log probabilities in the form that is asked for."""

    @abstractmethod
    def _answer(self, choices: list[tuple[int, _Choice]]) -> ChatCompletion | Completion:
        """The record of these choices."""


class ChatAnswer(Answer):
    """A whole chat answer."""

    def _add_logprobs(self, choice: _Choice, output: BackendOutput) -> None:
        found = self.form.logprobs and self.form.logprobs.chat(output)
        if found and found.content:
            choice.chat_logprobs += found.content

    def _answer(self, choices: list[tuple[int, _Choice]]) -> ChatCompletion:
        whole = [
            ChatChoice(
                index,
                ResponseMessage(content=choice.text),
                None if choice.finish_reason is None else choice.finish_reason.openai_completion,
                ChatLogprobs(choice.chat_logprobs) if choice.chat_logprobs else None,
            )
            for index, choice in choices
        ]
        return ChatCompletion(self.form.id, self.form.created, self.form.model, whole)


class CompletionAnswer(Answer):
    """A whole text completion."""

    def _add_logprobs(self, choice: _Choice, output: BackendOutput) -> None:
        found = self.form.logprobs and self.form.logprobs.completion(output, choice.length)
        if not found:
            return
        if choice.completion_logprobs is None:
            choice.completion_logprobs = found
        else:
            _extend(choice.completion_logprobs, found)

    def _answer(self, choices: list[tuple[int, _Choice]]) -> Completion:
        whole = [
            CompletionChoice(
                choice.text,
                index,
                choice.completion_logprobs,
                None if choice.finish_reason is None else choice.finish_reason.openai_completion,
            )
            for index, choice in choices
        ]
        return Completion(self.form.id, self.form.created, self.form.model, whole)


def _extend(whole: CompletionLogprobs, part: CompletionLogprobs) -> None:
    whole.tokens += part.tokens
    whole.token_logprobs += part.token_logprobs
    whole.top_logprobs += part.top_logprobs
    whole.text_offset += part.text_offset
