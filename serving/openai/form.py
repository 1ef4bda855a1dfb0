"""What whole answers and chunks have in common: prompts, the form that a request wants, usage, and events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias, TypeGuard, cast

from attrs import define, evolve, frozen
from msgspec.json import Encoder

from pipeline.protocols import BackendOutput, CompletionUsage, PromptTokensDetails, RoutingData, TopLogprob
from pipeline.protocols.openai import (
    ChatCompletionRequest,
    ChatLogprobs,
    ChosenLogprob,
    CompletionLogprobs,
    CompletionRequest,
    NvExtResponse,
    TokenLogprob,
)

OpenAIRequest: TypeAlias = ChatCompletionRequest | CompletionRequest


def one_per_prompt(request: OpenAIRequest) -> list[OpenAIRequest]:
    """Return one request for each prompt of the request; an engine answers them one by one.

    A chat, a text and a list of token ids are one prompt; a list of texts or of token lists is as many as it holds. An
    empty list stays for validation to refuse. Each prompt costs a copy of the request: count them before.
    """
    if not has_prompts(request):
        return [request]
    return [evolve(request, prompt=each) for each in cast("list[str | list[int]]", request.prompt)]


def has_prompts(request: OpenAIRequest) -> TypeGuard[CompletionRequest]:
    """Return whether the request has a list of prompts, even if the list has only one."""
    prompt = request.prompt if isinstance(request, CompletionRequest) else None
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


@define
class _Position:
    """One token of an answer: its text, id and log probability, and the likeliest tokens at its place."""

    text: str
    token_id: int
    logprob: float
    top: list[TopLogprob]


def _positions(output: BackendOutput) -> Iterator[_Position]:
    """Yield the tokens with a log probability."""
    tops = output.top_logprobs or [[] for _ in output.token_ids]
    known = zip(output.tokens, output.token_ids, output.log_probs or [], tops, strict=False)
    return (_Position(text or "", token_id, logprob, top) for text, token_id, logprob, top in known)


def text_length(output: BackendOutput) -> int:
    """Return the characters of an item's tokens, shown with it or held back for a stop string; of its text without."""
    known = [text for text in output.tokens if text is not None]
    return sum(map(len, known)) if known or output.token_ids else len(output.text or "")


@define
class LogprobForm:
    """The log probabilities that a client wants."""

    top: int = 0
    """How many of the likeliest tokens to show beside the chosen one."""
    as_token_ids: bool = False
    """Show tokens as `token_id:<id>` instead of their texts."""

    def chat(self, output: BackendOutput) -> ChatLogprobs | None:
        """Return them in the form of chats, None if the engine gave none."""
        if output.log_probs is None:
            return None
        return ChatLogprobs([self._chosen(position) for position in _positions(output)])

    def completion(self, output: BackendOutput, offset: int) -> CompletionLogprobs | None:
        """Return them in the form of completions from the offset in characters, None if the engine gave none."""
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
        """Return the wanted number of likeliest tokens, and the chosen one if it is not among them."""
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


_NO_ROUTING = RoutingData()
_NO_FIELDS: frozenset[str] = frozenset()
"""Shared: an empty set takes 216 bytes, for as long as the answer lasts."""


@frozen
class AnswerForm:
    """The parts of a request that shape its answer. Choice k of prompt i has the index `i * choices_per_prompt + k`."""

    id: str
    """Id of the answer."""
    created: int
    """Seconds since the epoch."""
    model: str
    prompts: int = 1
    choices_per_prompt: int = 1
    include_usage: bool = False
    """Whether a stream ends with its usage."""
    continuous_usage: bool = False
    """Whether every chunk has the usage so far."""
    logprobs: LogprobForm | None = None
    """None: no log probabilities."""
    extra_fields: frozenset[str] = frozenset()
    """Fields of `nvext` in the answer."""

    @classmethod
    def of(
        cls, request: OpenAIRequest, *, id: str, created: int, prompts: int = 1, force_usage: bool = False
    ) -> AnswerForm:
        """Return the form that the request wants; `force_usage` adds usage to every stream."""
        options, top = request.stream_options, request.wanted_logprobs()
        wants_usage = force_usage or (options is not None and bool(options.include_usage))
        return cls(
            id=id,
            created=created,
            model=request.model,
            prompts=prompts,
            choices_per_prompt=request.n or 1,
            include_usage=wants_usage,
            continuous_usage=wants_usage and options is not None and bool(options.continuous_usage_stats),
            logprobs=None if top is None else LogprobForm(top, bool(request.return_tokens_as_token_ids)),
            extra_fields=_NO_FIELDS if request.nvext is None else request.nvext.wanted_response_fields(),
        )

    @property
    def choices(self) -> int:
        """Number of choices of the whole answer."""
        return self.prompts * self.choices_per_prompt

    def index(self, output: BackendOutput, prompt: int) -> int:
        """Return the index of the item's choice in the whole answer."""
        return prompt * self.choices_per_prompt + (output.index or 0)

    def nvext(self, output: BackendOutput) -> NvExtResponse | None:
        """Return the wanted extension fields that the item has, None without any."""
        if not self.extra_fields:
            return None
        routing = output.routing_data or _NO_ROUTING
        known = NvExtResponse(
            worker_id=routing.worker_id,
            timing=routing.timing,
            token_ids=routing.token_ids,
            router_decision=routing.decision,
            engine_data=output.engine_data,
            stop_reason=output.stop_reason,
            completion_token_ids=output.token_ids or None,
        )
        return known.select(self.extra_fields, finished=output.finish_reason is not None, choices=self.choices)


encode = Encoder().encode
"""Return the JSON of a plain value; a text is quoted and escaped."""

PLACE = "\x00text\x00"
"""Stands for the text in `around`."""


def event(plain: Any) -> bytes:
    """Return the server-sent event with this plain value as its data."""
    return b"data: " + encode(plain) + b"\n\n"


def around(plain: Any) -> tuple[bytes, bytes]:
    """Return the bytes of the event before and after a text; `PLACE` stands for that text in the plain value.

    `before + encode(text) + after` is the event of any text, at a fraction of the cost of encoding the whole value.
    """
    before, _, after = event(plain).rpartition(encode(PLACE))
    return before, after


class CountsTokens(Protocol):
    """Counts the tokens of one answer, those of all its prompts."""

    @property
    def output_tokens(self) -> int: ...


class UsageCount:
    """The usage of one answer so far: the sum over its prompts. A worker's own report of a prompt takes precedence.

    The tokens of the answer itself are counted by `counted`, for the metrics, too.
    """

    __slots__ = ("_cached_tokens", "_counted", "_prompt_tokens", "_reported")

    def __init__(self, counted: CountsTokens, prompts: int = 1) -> None:
        self._counted = counted
        self._prompt_tokens: list[int] = [0] * prompts
        self._cached_tokens: list[int | None] = [None] * prompts
        self._reported: CompletionUsage | None = None

    def add(self, output: BackendOutput, prompt: int) -> None:
        """Take note of one item of that prompt's stream."""
        if (usage := output.completion_usage) is not None:
            self._reported = usage
            self.prompt(prompt, usage.prompt_tokens, usage.prompt_tokens_details)

    def prompt(self, prompt: int, tokens: int, details: PromptTokensDetails | None = None) -> None:
        """Set the number of tokens of that prompt; the last call holds."""
        self._prompt_tokens[prompt] = tokens
        if details is not None and details.cached_tokens is not None:
            self._cached_tokens[prompt] = details.cached_tokens

    @property
    def completion_tokens(self) -> int:
        return self._counted.output_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that workers had in their caches; None if no worker reported any number."""
        known = [count for count in self._cached_tokens if count is not None]
        return sum(known) if known else None

    def total(self) -> CompletionUsage:
        """Return the usage so far."""
        usage = CompletionUsage.of(self.prompt_tokens, self.completion_tokens)
        if (cached := self.cached_tokens) is not None:
            usage.prompt_tokens_details = PromptTokensDetails(cached)
        if self._reported is not None and len(self._prompt_tokens) == 1:
            usage.prompt_tokens_details = self._reported.prompt_tokens_details
            usage.completion_tokens_details = self._reported.completion_tokens_details
        return usage
