"""What a chat or completion request may hold: one table of fields and rules, below the checks that it names.

The codec has checked the kinds of values before; here are ranges and combinations. The first broken rule, in the
order of the table, is reported as InvalidArgument "Validation: ...", with the path of the place as its field.

Source: dynamo lib/llm/src/protocols/openai/validate.rs. Other than there, nothing limits stop strings a second time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from string import ascii_letters, digits
from typing import Any, TypeAlias

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.protocols.field_rules import shortened
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    NamedToolChoice,
    NvExt,
    Prompt,
    ResponseFormat,
    StreamOptions,
    Tool,
    ToolChoice,
)
from pipeline.wire import is_json_object

from .request_size import CHOICES_MAX, batch_size, check_size

NAMED_MAX = 8
"""How many unknown fields an error names."""
STOPS_MAX = 32
PROMPT_EMBEDS_BYTES_MIN, PROMPT_EMBEDS_BYTES_MAX = 100, 10 * 1024 * 1024
_BASE64 = (ascii_letters + digits + "+/").encode()
_LOOKED_AT = 1024
_WHOLE_BELOW = 2**53
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")

Fault: TypeAlias = tuple[str, str]
Check: TypeAlias = Callable[[Any, Any], Iterator[Fault]]
"""Given the field's value and the whole request, yields each place below the field and what is wrong there."""

KEYWORDS: dict[Check, Mapping[str, object]] = {}
"""Check -> the keywords of JSON Schema for as much of it as one value alone can break."""


def shown(**keywords: object) -> Callable[[Check], Check]:
    """Declare what a JSON schema has for this check."""

    def declare(check: Check) -> Check:
        KEYWORDS[check] = keywords
        return check

    return declare


def between(label: str, low: float, high: float, *, above_low: bool = False) -> Check:
    """A number from `low` to `high`, or with `above_low` greater than `low`; never NaN."""

    def check(value: float, _: GenerationRequest) -> Iterator[Fault]:
        if not low <= value <= high or (above_low and value == low):
            yield "", f"{label} must be between {low} and {high}, got {_shown(value)}"

    return shown(**{"exclusiveMinimum" if above_low else "minimum": low, "maximum": high})(check)


def at_least(label: str, low: float) -> Check:
    """A number not below `low`."""

    def check(value: float, _: GenerationRequest) -> Iterator[Fault]:
        if not value >= low:
            yield "", f"{label} must be at least {low}, got {_shown(value)}"

    return shown(minimum=low)(check)


def not_blank(label: str) -> Check:
    """A text with something in it."""

    def check(value: str, _: GenerationRequest) -> Iterator[Fault]:
        if not value[:_LOOKED_AT].strip():  # a text of megabytes of blanks is none either
            yield "", f"{label} cannot be empty"

    return shown(pattern=r"\S")(check)


@shown(additionalProperties=False)
def known_only(unknown: Mapping[str, Any], request: GenerationRequest) -> Iterator[Fault]:
    """No field that has no meaning here; the first of them are named together."""
    deprecated = [name for name in ("functions", "function_call") if getattr(request, name, None) is not None]
    if count := len(unknown) + len(deprecated):
        names = [shortened(name) for name in islice(chain(unknown, deprecated), NAMED_MAX)]
        more = f" and {count - NAMED_MAX} more" if count > NAMED_MAX else ""
        yield "", "Unsupported parameter(s): " + ", ".join(f"`{name}`" for name in names) + more


def own_template_args(args: Mapping[str, Any], _: ChatCompletionRequest) -> Iterator[Fault]:
    """A request cannot bring its own template."""
    if "chat_template" in args:
        yield "chat_template", "Chat_template_args cannot hold a chat_template"


@shown(minItems=1)
def messages(found: Sequence[ChatMessage], _: ChatCompletionRequest) -> Iterator[Fault]:
    """At least one message, of text only."""
    if not found:
        yield "", "Messages array cannot be empty"
    for i, message in enumerate(found):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type not in ("text", "refusal"):
                kind = shortened(part.type)
                yield f"[{i}].content[{j}].type", f"Messages cannot hold content of type {kind} for this model"


def tool_call_arguments(found: Sequence[ChatMessage], _: ChatCompletionRequest) -> Iterator[Fault]:
    """The arguments of the assistant's tool calls are JSON objects."""
    for i, message in enumerate(found):
        for j, call in enumerate(message.tool_calls or ()):
            if not is_json_object(call.function.arguments):
                place = f"[{i}].tool_calls[{j}].function.arguments"
                yield place, f"Messages{place} must be a JSON object"


@shown(additionalProperties={"type": "number", "minimum": -100, "maximum": 100})
def logit_bias(biases: Mapping[str, float], _: GenerationRequest) -> Iterator[Fault]:
    """Each between -100 and 100."""
    for token, bias in biases.items():
        if not -100 <= bias <= 100:
            token = shortened(token)
            yield token, f"Logit_bias for token {token} must be between -100 and 100, got {_shown(bias)}"


@shown(minimum=1, maximum=CHOICES_MAX)
def choices(n: int, request: GenerationRequest) -> Iterator[Fault]:
    """Not too many, over all prompts, and different ones only if there is chance."""
    if not 1 <= n <= CHOICES_MAX:
        yield "", f"N must be between 1 and {CHOICES_MAX}, got {n}"
    if n > 1 and request.temperature == 0:
        yield "", f"N must be 1 when temperature is 0, got {n}"


def best_of(value: int, request: GenerationRequest) -> Iterator[Fault]:
    """Exactly as many as are returned: nothing here ranks candidates and leaves some out."""
    n = 1 if request.n is None else request.n
    if value < n:
        yield "", f"Best_of must be greater than or equal to n, got best_of={value} and n={n}"
    if value > n:
        yield "", f"Best_of greater than n is not supported, got best_of={value} and n={n}"


@shown(minLength=1, minItems=1, maxItems=STOPS_MAX)
def stop(stops: str | Sequence[str | int], _: GenerationRequest) -> Iterator[Fault]:
    """Strings or ids: some, not too many, none of them empty."""
    if isinstance(stops, str):
        if not stops:
            yield "", "Stop cannot be an empty string"
        return
    if not 1 <= len(stops) <= STOPS_MAX:
        yield "", f"Stop must have between 1 and {STOPS_MAX} entries, got {len(stops)}"
    for i, entry in enumerate(stops):
        if entry == "":
            yield f"[{i}]", f"Stop[{i}] cannot be an empty string"


@shown(maxItems=STOPS_MAX)
def stop_token_ids(ids: Sequence[int], _: GenerationRequest) -> Iterator[Fault]:
    """Not too many; an empty list is what many clients send for none."""
    if len(ids) > STOPS_MAX:
        yield "", f"Stop_token_ids must have at most {STOPS_MAX} entries, got {len(ids)}"


def tools(found: Sequence[Tool], _: ChatCompletionRequest) -> Iterator[Fault]:
    """Each with a usable name."""
    for i, tool in enumerate(found):
        if not TOOL_NAME.fullmatch(tool.function.name):
            place = f"[{i}].function.name"
            yield place, f"Tools{place} must be 1 to 128 letters, digits, underscores or dashes"


def tool_choice(choice: ToolChoice, request: ChatCompletionRequest) -> Iterator[Fault]:
    """No tool call is demanded: nothing here makes a model call a tool, or finds the call in its text."""
    names = {tool.function.name for tool in request.tools or ()}
    if choice == "required":
        if not names:
            yield "", "Tool_choice is required, but there are no tools"
        yield "", "`tool_choice` required is not supported, use auto or none"
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            yield "function.name", f"Tool_choice names {shortened(choice.function.name)}, which is not among the tools"
        yield "", "A function in `tool_choice` is not supported, use auto or none"


def response_format(form: ResponseFormat, _: GenerationRequest) -> Iterator[Fault]:
    """A JSON schema that is wanted is there, with its name."""
    if form.type != "json_schema":
        return
    schema = form.json_schema
    if schema is None:
        yield "json_schema", "`response_format.json_schema` is required when the type is json_schema"
    elif not schema.name.strip():
        yield "json_schema.name", "`response_format.json_schema.name` cannot be empty"
    elif schema.schema is None:
        yield "json_schema.schema", "`response_format.json_schema.schema` is required"
    elif not isinstance(schema.schema, dict):
        yield "json_schema.schema", "`response_format.json_schema.schema` must be a JSON object"


def not_supported(name: str) -> Check:
    """A field for something that is not done here: empty, false, or not given at all."""

    def check(value: object, _: GenerationRequest) -> Iterator[Fault]:
        if value not in (False, ""):
            yield "", f"`{name}` is not supported"

    return shown(enum=[False, "", None])(check)


@shown(items={"const": "text"})
def text_only(modalities: Sequence[str], _: ChatCompletionRequest) -> Iterator[Fault]:
    """Text is the only output."""
    for i, modality in enumerate(modalities):
        if modality != "text":
            yield f"[{i}]", f"Modalities other than text are not supported, got {shortened(modality)}"


@shown(enum=["auto", "default", None])
def service_tier(tier: str, _: ChatCompletionRequest) -> Iterator[Fault]:
    """There is one tier only."""
    if tier not in ("auto", "default"):
        yield "", f"Service_tier must be auto or default, got {shortened(tier)}"


def top_logprobs(count: int, request: ChatCompletionRequest) -> Iterator[Fault]:
    """Not together with `logprobs` set to false."""
    if count and request.logprobs is False:
        yield "", "Top_logprobs cannot be given when `logprobs` is false"


def stream_options(options: StreamOptions, request: GenerationRequest) -> Iterator[Fault]:
    """Only of a stream, and nothing that its chunks do not have."""
    if not request.stream:
        yield "", "`stream_options` can only be given when `stream` is true"
    if options.include_obfuscation:
        yield "include_obfuscation", "`stream_options.include_obfuscation` is not supported"


@shown(minLength=1, minItems=1)
def prompt(found: Prompt | None, request: CompletionRequest) -> Iterator[Fault]:
    """There is one, or embeddings instead, and no part of it is empty."""
    if found is None:
        if request.prompt_embeds is None:
            yield "", "Prompt or prompt_embeds must be given"
    elif not found:
        yield "", f"Prompt {'string' if isinstance(found, str) else 'array'} cannot be empty"
    elif not isinstance(found, str) and not isinstance(found[0], int):  # token ids are no parts
        for i, entry in enumerate(found):
            if not entry and not isinstance(entry, int):
                yield f"[{i}]", f"Prompt[{i}] cannot be empty"


@shown(contentEncoding="base64")
def prompt_embeds(found: str, _: GenerationRequest) -> Iterator[Fault]:
    """Base64, of a size that may be a tensor. It is not decoded: only its characters are looked at."""
    size = len(found) // 4 * 3 - found[-2:].count("=")
    if size <= PROMPT_EMBEDS_BYTES_MAX and not _is_base64(found):
        yield "", "Prompt_embeds must be valid base64"
    elif not PROMPT_EMBEDS_BYTES_MIN <= size <= PROMPT_EMBEDS_BYTES_MAX:
        limits = f"between {PROMPT_EMBEDS_BYTES_MIN} and {PROMPT_EMBEDS_BYTES_MAX}"
        yield "", f"Prompt_embeds must decode to {limits} bytes, got {size}"


def _is_base64(text: str) -> bool:
    if len(text) % 4 or not text.isascii():
        return False
    rest = text.encode().translate(None, _BASE64)
    return rest in (b"", b"=", b"==") and text.endswith(rest.decode())


def nvext(extension: NvExt, request: GenerationRequest) -> Iterator[Fault]:
    """Token ids come for a single prompt and go back for a single choice only; no metadata is sent anywhere."""
    is_batch = isinstance(request, CompletionRequest) and batch_size(request.prompt) > 1
    if "completion_token_ids" in (extension.extra_fields or ()) and (is_batch or request.n not in (None, 1)):
        yield "extra_fields", "Nvext extra field completion_token_ids needs exactly one choice"
    if extension.token_data is not None and is_batch:
        yield "token_data", "Nvext token_data needs exactly one prompt"
    if extension.metadata_upload is not None:
        yield "metadata_upload", "`nvext.metadata_upload` is not supported"


def _shown(number: float) -> str:
    """The number as a client most likely wrote it: whole ones without a fraction."""
    return str(int(number) if abs(number) < _WHOLE_BELOW and number == int(number) else number)


# -- the table

TOKENS_MAX = 1_048_576
DEFAULT_LIMITS = RequestLimits()


@frozen
class Rule:
    """One row: a field, the check of its value, and the kind of request it is for. Only `prompt` is checked unset."""

    field: str
    check: Check
    kind: type[GenerationRequest] = GenerationRequest
    is_required: bool = False


RULES = (
    Rule("unsupported", known_only),
    Rule("chat_template_args", own_template_args, ChatCompletionRequest),
    Rule("messages", messages, ChatCompletionRequest),
    Rule("messages", tool_call_arguments, ChatCompletionRequest),
    Rule("prompt", prompt, CompletionRequest, is_required=True),
    Rule("prompt_embeds", prompt_embeds),
    Rule("model", not_blank("Model")),
    Rule("user", not_blank("User ID")),
    Rule("frequency_penalty", between("Frequency penalty", -2, 2)),
    Rule("presence_penalty", between("Presence penalty", -2, 2)),
    Rule("repetition_penalty", between("Repetition penalty", 0, 2, above_low=True)),
    Rule("temperature", between("Temperature", 0, 2)),
    Rule("top_p", between("Top_p", 0, 1, above_low=True)),
    Rule("min_p", between("Min_p", 0, 1)),
    Rule("top_k", at_least("Top_k", -1)),
    Rule("logit_bias", logit_bias),
    Rule("top_logprobs", between("Top_logprobs", 0, 20), ChatCompletionRequest),
    Rule("top_logprobs", top_logprobs, ChatCompletionRequest),
    Rule("logprobs", between("Logprobs", 0, 5), CompletionRequest),
    Rule("n", choices),
    Rule("best_of", between("Best_of", 0, 20), CompletionRequest),
    Rule("best_of", best_of, CompletionRequest),
    Rule("max_tokens", between("Max_tokens", 1, TOKENS_MAX)),
    Rule("max_completion_tokens", between("Max_completion_tokens", 1, TOKENS_MAX), ChatCompletionRequest),
    Rule("stop", stop),
    Rule("stop_token_ids", stop_token_ids),
    Rule("tools", tools, ChatCompletionRequest),
    Rule("tool_choice", tool_choice, ChatCompletionRequest),
    Rule("response_format", response_format),
    Rule("stream_options", stream_options),
    Rule("modalities", text_only, ChatCompletionRequest),
    Rule("audio", not_supported("audio"), ChatCompletionRequest),
    Rule("store", not_supported("store"), ChatCompletionRequest),
    Rule("web_search_options", not_supported("web_search_options"), ChatCompletionRequest),
    Rule("service_tier", service_tier, ChatCompletionRequest),
    Rule("echo", not_supported("echo"), CompletionRequest),
    Rule("suffix", not_supported("suffix"), CompletionRequest),
    Rule("nvext", nvext),
)


def keywords_of(kind: type[GenerationRequest]) -> dict[str, dict[str, object]]:
    """For each field of this kind of request that has rules: the keywords of JSON Schema that stand for them.

    What depends on more than one field is not among them.
    """
    found: dict[str, dict[str, object]] = {}
    for rule in RULES:
        if issubclass(kind, rule.kind) and rule.check in KEYWORDS:
            found.setdefault(rule.field, {}).update(KEYWORDS[rule.check])
    return found


def validate(
    request: GenerationRequest, *, ignore_unsupported: bool = False, limits: RequestLimits = DEFAULT_LIMITS
) -> None:
    """Raise InvalidArgument if the request is beyond a limit, then for the first rule it breaks.

    Fields unknown here may be ignored instead.
    """
    check_size(request, limits)
    for rule in RULES:
        if not isinstance(request, rule.kind) or (ignore_unsupported and rule.field == "unsupported"):
            continue
        value = getattr(request, rule.field)
        if value is None and not rule.is_required:
            continue
        for place, problem in rule.check(value, request):
            joint = "." if place and not place.startswith("[") else ""
            raise InvalidArgument(f"Validation: {problem}", field=f"{rule.field}{joint}{place}")
