"""What OpenAI clients get back: chat and text completions, whole or in chunks, and the list of models.

Source: dynamo lib/protocols and lib/llm/src/protocols/openai, response types.
"""

from __future__ import annotations

from typing import Literal

from attrs import define, field

from ..field_rules import U8, U32, U64, null
from ..usage import CompletionUsage, ContentPart
from .nvext import NvExtResponse
from .requests import FunctionCall, Role, ToolCall

ChatFinish = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]
CompletionFinish = Literal["stop", "length", "content_filter"]


@define(slots=True)
class TokenLogprob:
    """One token with its log probability and its UTF-8 bytes, null for an empty text."""

    token: str
    logprob: float
    bytes: list[U8] | None = null()


@define(slots=True)
class ChosenLogprob:
    """The token that was chosen, and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[U8] | None = null()
    top_logprobs: list[TokenLogprob] = field(factory=list)


@define(slots=True)
class ChatLogprobs:
    """One entry per token of the content."""

    content: list[ChosenLogprob] | None = null()
    refusal: list[ChosenLogprob] | None = null()


@define(slots=True)
class FunctionCallDelta:
    """A piece of a function call; the pieces of `arguments` are joined."""

    name: str | None = None
    arguments: str | None = None


@define(slots=True)
class ToolCallDelta:
    """A piece of the tool call at `index`."""

    index: U32
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta | None = None


@define(slots=True)
class ChatDelta:
    """What a chunk adds to a message; the role comes with the first chunk of a choice only."""

    role: Role | None = None
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionCallDelta | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


@define(slots=True)
class ChatChunkChoice:
    """One choice's part of a chunk."""

    index: U32
    delta: ChatDelta
    finish_reason: ChatFinish | None = null()
    logprobs: ChatLogprobs | None = null()


@define(slots=True)
class ChatCompletionChunk:
    """One event of a streamed chat. `created` is in seconds since the epoch; the usage chunk has no choices."""

    id: str
    created: U64
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: CompletionUsage | None = null()
    service_tier: str | None = None
    system_fingerprint: str | None = None
    nvext: NvExtResponse | None = None


@define(slots=True)
class ResponseMessage:
    """The assistant's whole answer."""

    role: Role = "assistant"
    content: str | list[ContentPart] | None = null()
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


@define(slots=True)
class ChatChoice:
    """One whole choice."""

    index: U32
    message: ResponseMessage
    finish_reason: ChatFinish | None = null()
    logprobs: ChatLogprobs | None = null()


@define(slots=True)
class ChatCompletion:
    """A whole chat answer."""

    id: str
    created: U64
    model: str
    choices: list[ChatChoice]
    object: str = "chat.completion"
    usage: CompletionUsage | None = None
    service_tier: str | None = None
    system_fingerprint: str | None = None
    nvext: NvExtResponse | None = None


@define(slots=True)
class CompletionLogprobs:
    """Four lists of one entry per token: text, log probability, the likeliest texts, and the offset in the text."""

    tokens: list[str] = field(factory=list)
    token_logprobs: list[float | None] = field(factory=list)
    top_logprobs: list[dict[str, float] | None] = field(factory=list)
    text_offset: list[U32] = field(factory=list)


@define(slots=True)
class CompletionChoice:
    """One choice, whole or one chunk's part of it."""

    text: str
    index: U32
    logprobs: CompletionLogprobs | None = null()
    finish_reason: CompletionFinish | None = null()


@define(slots=True)
class Completion:
    """A text completion; whole answers and chunks have the same shape."""

    id: str
    created: U64
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: CompletionUsage | None = null()
    system_fingerprint: str | None = None
    nvext: NvExtResponse | None = None


@define(slots=True)
class ModelInfo:
    """One served model; sizes in tokens."""

    id: str
    created: U64
    object: str = "model"
    owned_by: str = "penstock"
    context_window: U32 | None = None
    max_output_tokens: U32 | None = None


@define(slots=True)
class ModelList:
    """The models that can be used now."""

    data: list[ModelInfo]
    object: str = "list"
