"""Chat and text completion requests as OpenAI clients send them, with the extensions engines know.

Ranges and combinations are checked where the request is served; only types are declared here, so that one
place can reject all bad values with one wording. Keys no field claims are kept in `unsupported`.

Source: dynamo lib/llm/src/protocols/openai/{chat_completions,completions,common_ext}.rs.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

from attrs import define

from ..field_rules import I32, I64, U32, InvalidRecord, needs, rest, skip
from ..usage import ContentPart
from .nvext import NvExt

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


@define(slots=True)
class FunctionCall:
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str = ""


@define(slots=True)
class ToolCall:
    """One call the assistant made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


_NEEDED_BY_ROLE: dict[str, tuple[str, ...]] = {
    "system": ("content",),
    "developer": ("content",),
    "user": ("content",),
    "tool": ("content", "tool_call_id"),
    "function": ("name",),
}


@define(slots=True)
class ChatMessage:
    """One message. Which fields it needs depends on its role; keys unknown here are kept for the chat template.

    Raises InvalidRecord for a message without content (an assistant may have none), a tool message without
    `tool_call_id`, a function message without `name`.
    """

    wire_needs: ClassVar[dict[str, Any]] = needs("role", _NEEDED_BY_ROLE)

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | list[str] | None = None
    audio: dict[str, Any] | None = None
    extra: dict[str, Any] = rest()

    def __attrs_post_init__(self) -> None:
        needed = _NEEDED_BY_ROLE.get(self.role, ())
        for name in needed:
            if getattr(self, name) is None:
                raise InvalidRecord(f"is required in a message of role {self.role}", name)


@define(slots=True)
class FunctionDefinition:
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@define(slots=True)
class Tool:
    """One tool the model may use."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


@define(slots=True)
class FunctionName:
    """A function named without its definition."""

    name: str


@define(slots=True)
class NamedToolChoice:
    """The one function the model must call."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedToolChoice


@define(slots=True)
class JsonSchemaFormat:
    """A named JSON schema the answer must follow."""

    name: str
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


@define(slots=True)
class ResponseFormat:
    """The form of the answer; further keys belong to a structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    extra: dict[str, Any] = rest()


@define(slots=True)
class StreamOptions:
    """What a stream carries beside its chunks."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


@define(slots=True, kw_only=True)
class GenerationRequest:
    """The fields chat and text completions share: sampling, stopping, output, extensions."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: I64 | None = None
    stop: str | list[str] | list[U32] | None = None
    max_tokens: I64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: I64 | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None

    top_k: I32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    use_beam_search: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: U32 | None = None
    stop_token_ids: list[U32] | None = None
    include_stop_str_in_output: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None

    prompt_logprobs: U32 | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    detokenize: bool | None = None
    allowed_token_ids: list[U32] | None = None
    bad_words_token_ids: list[list[U32]] | None = None
    logprob_token_ids: list[U32] | None = None
    cache_salt: str | None = None
    prompt_embeds: str | None = None
    mm_processor_kwargs: Any = None
    nvext: NvExt | None = None
    unsupported: dict[str, Any] = rest()

    def wanted_logprobs(self) -> int | None:
        """Return the number of likeliest tokens to report per token. 0: only the chosen one; None: no logprobs."""
        return None


@define(slots=True, kw_only=True)
class ChatCompletionRequest(GenerationRequest):
    """A chat. `max_completion_tokens` takes precedence over `max_tokens`."""

    messages: list[ChatMessage]
    max_completion_tokens: I64 | None = None
    logprobs: bool | None = None
    top_logprobs: I64 | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    reasoning_effort: str | None = None
    thinking: bool | dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = skip(aliases=("chat_template_kwargs",))
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    media_io_kwargs: Any = None
    store: bool | None = None
    modalities: list[str] | None = None
    prediction: Any = None
    audio: Any = None
    service_tier: str | None = None
    web_search_options: Any = None

    def wanted_logprobs(self) -> int | None:
        """As in every request; `logprobs` without a number means one, a number without `logprobs` means that many."""
        if self.logprobs is None:
            return self.top_logprobs or None
        return (1 if self.top_logprobs is None else self.top_logprobs) if self.logprobs else None


Prompt: TypeAlias = str | list[str] | list[U32] | list[list[U32]]


@define(slots=True, kw_only=True)
class CompletionRequest(GenerationRequest):
    """A text to continue: one prompt or several, as text or as token ids, or `prompt_embeds` instead."""

    wire_needs: ClassVar[dict[str, Any]] = {"anyOf": [{"required": ["prompt"]}, {"required": ["prompt_embeds"]}]}

    prompt: Prompt | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: I64 | None = None
    logprobs: I64 | None = None

    def wanted_logprobs(self) -> int | None:
        """Return the field itself."""
        return self.logprobs
