"""AnswerForm: what a client asked of the form of its answer; the same for whole answers and chunks.

Log probabilities in the two OpenAI forms.

JSON for the wire: plain values, and the one text that changes from token to token.

UsageCount: the tokens of one answer, counted as they pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import define, frozen
from msgspec.json import Encoder

from pipeline.protocols import BackendOutput, CompletionUsage, NvExtResponse, PromptTokensDetails, TopLogprob
from pipeline.protocols.openai import (
    ChatCompletionRequest,
    ChatLogprobs,
    ChosenLogprob,
    CompletionLogprobs,
    CompletionRequest,
    TokenLogprob,
)


@define(slots=True)
class _Position:
    """One token of an answer: its text, id and log probability, and the likeliest tokens at its place."""

    text: str
    token_id: int
    logprob: float
    top: list[TopLogprob]


def _positions(output: BackendOutput) -> Iterator[_Position]:
    """The tokens for which the engine gave a log probability."""
    tops = output.top_logprobs or [[] for _ in output.token_ids]
    for text, token_id, logprob, top in zip(
        output.tokens, output.token_ids, output.log_probs or [], tops, strict=False
    ):
        yield _Position(text or "", token_id, logprob, top)


@define(slots=True)
class LogprobForm:
    """What a client wants to see: so many likely tokens beside the chosen one, texts or `token_id:<id>`."""

    top: int = 0
    as_token_ids: bool = False

    def chat(self, output: BackendOutput) -> ChatLogprobs | None:
        """The form of chat; None if the engine gave none."""
        if output.log_probs is None:
            return None
        return ChatLogprobs([self._chosen(position) for position in _positions(output)])

    def completion(self, output: BackendOutput, offset: int) -> CompletionLogprobs | None:
        """The form of completions, the text beginning at `offset` characters; None if the engine gave none."""
        if output.log_probs is None:
            return None
        logprobs = CompletionLogprobs()
        for position in _positions(output):
            logprobs.tokens.append(self._shown(position.text, position.token_id))
            logprobs.token_logprobs.append(position.logprob)
            logprobs.top_logprobs.append({each.token: each.logprob for each in self._likely(position)} or None)
            logprobs.text_offset.append(offset)
            offset += len(position.text)
        return logprobs

    def _chosen(self, position: _Position) -> ChosenLogprob:
        own = self._entry(position.text, position.token_id, position.logprob)
        return ChosenLogprob(own.token, own.logprob, own.bytes, self._likely(position))

    def _likely(self, position: _Position) -> list[TokenLogprob]:
        """The likeliest tokens as many as wanted, and the chosen one if it is not among them."""
        if not self.top:
            return []
        top = position.top[: self.top]
        likely = [self._entry(each.token or "", each.token_id, each.logprob, each.bytes) for each in top]
        if all(each.token_id != position.token_id for each in top):
            likely.append(self._entry(position.text, position.token_id, position.logprob))
        return likely

    def _entry(self, text: str, token_id: int, logprob: float, known_bytes: list[int] | None = None) -> TokenLogprob:
        return TokenLogprob(self._shown(text, token_id), logprob, known_bytes or (list(text.encode()) or None))

    def _shown(self, text: str, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_token_ids else text


_NO_FIELDS: frozenset[str] = frozenset()
"""Shared: an empty set takes 216 bytes, for as long as the answer lasts."""


@frozen
class AnswerForm:
    """The parts of a request its answer depends on. `created` is in seconds since the epoch.

    Choice k of prompt i has index `i * choices_per_prompt + k`.
    """

    id: str
    created: int
    model: str
    prompts: int = 1
    choices_per_prompt: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: LogprobForm | None = None
    extra_fields: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        request: ChatCompletionRequest | CompletionRequest,
        *,
        id: str,
        created: int,
        prompts: int = 1,
        force_usage: bool = False,
    ) -> AnswerForm:
        """The form the request asks for; `force_usage` adds usage to every stream."""
        options = request.stream_options
        asked = options is not None and bool(options.include_usage)
        return cls(
            id=id,
            created=created,
            model=request.model,
            prompts=prompts,
            choices_per_prompt=request.n or 1,
            include_usage=asked or force_usage,
            continuous_usage=options is not None and bool(options.continuous_usage_stats) and (asked or force_usage),
            logprobs=_logprobs(request),
            extra_fields=_NO_FIELDS if request.nvext is None else request.nvext.wanted_response_fields(),
        )

    @property
    def choices(self) -> int:
        """How many choices the whole answer has."""
        return self.prompts * self.choices_per_prompt

    def index(self, output: BackendOutput, prompt: int) -> int:
        """The index of the item's choice in the whole answer."""
        return prompt * self.choices_per_prompt + (output.index or 0)

    def nvext(self, output: BackendOutput) -> NvExtResponse | None:
        """The extension fields that were asked for and that the item has."""
        if not self.extra_fields:
            return None
        routing = output.routing_data
        known = NvExtResponse(
            worker_id=None if routing is None else routing.worker_id,
            timing=None if routing is None else routing.timing,
            token_ids=None if routing is None else routing.token_ids,
            router_decision=None if routing is None else routing.decision,
            engine_data=output.engine_data,
            stop_reason=output.stop_reason,
            completion_token_ids=output.token_ids or None,
        )
        return known.select(self.extra_fields, finished=output.finish_reason is not None, choices=self.choices)


def _logprobs(request: ChatCompletionRequest | CompletionRequest) -> LogprobForm | None:
    """The wanted log probabilities."""
    top = request.wanted_logprobs()
    return None if top is None else LogprobForm(top, bool(request.return_tokens_as_token_ids))


encode = Encoder().encode
"""The JSON of a plain value; a text comes out quoted and escaped."""

PLACE = "\x00text\x00"
"""Stands for the text in `around`."""


def event(plain: Any) -> bytes:
    """The server-sent event whose data is this plain value."""
    return b"data: " + encode(plain) + b"\n\n"


def around(plain: Any) -> tuple[bytes, bytes]:
    """The event's bytes before and after the text, in a plain value that has `PLACE` in its stead.

    `before + encode(text) + after` is then the event of any text, for a fraction of encoding the whole value.
    """
    before, _, after = event(plain).rpartition(encode(PLACE))
    return before, after


class UsageCount:
    """Counts the tokens of every prompt's stream; what a worker reports of its prompt is believed.

    Prompts sent together are summed.
    """

    __slots__ = ("_cached_tokens", "_prompt_tokens", "_reported", "completion_tokens")

    def __init__(self, prompts: int = 1) -> None:
        self.completion_tokens = 0
        self._prompt_tokens: list[int] = [0] * prompts
        self._cached_tokens: list[int | None] = [None] * prompts
        self._reported: CompletionUsage | None = None

    def add(self, output: BackendOutput, prompt: int) -> None:
        """Counts one item of the stream of that prompt."""
        self.completion_tokens += len(output.token_ids)
        if (usage := output.completion_usage) is not None:
            self._reported = usage
            self.prompt(prompt, usage.prompt_tokens, usage.prompt_tokens_details)

    def prompt(self, prompt: int, tokens: int, details: PromptTokensDetails | None = None) -> None:
        """That prompt has so many tokens; the last report holds."""
        self._prompt_tokens[prompt] = tokens
        if details is not None and details.cached_tokens is not None:
            self._cached_tokens[prompt] = details.cached_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that workers had in their caches; None if no worker said."""
        known = [count for count in self._cached_tokens if count is not None]
        return sum(known) if known else None

    def total(self) -> CompletionUsage:
        """The counts up to now."""
        usage = CompletionUsage.of(self.prompt_tokens, self.completion_tokens)
        if (cached := self.cached_tokens) is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached)
        if self._reported is not None and len(self._prompt_tokens) == 1:
            usage.prompt_tokens_details = self._reported.prompt_tokens_details
            usage.completion_tokens_details = self._reported.completion_tokens_details
        return usage
