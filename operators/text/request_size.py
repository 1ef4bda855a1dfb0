"""How much a request holds, against its limits, and how much work its prompt is; found without doing it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    Prompt,
)

CHOICES_MAX = 128
"""Of `n`, and of prompts times `n`."""

_ENTRIES = (
    ("messages", "max_messages"),
    ("tools", "max_tools"),
    ("logit_bias", "max_logit_bias_entries"),
    ("metadata", "max_field_entries"),
    ("functions", "max_field_entries"),
    ("modalities", "max_field_entries"),
    ("guided_choice", "max_field_entries"),
)
"""Lists and objects, and the limit of their entries."""
_EXTENSION_ENTRIES = ("annotations", "extra_fields")
"""Lists in `nvext` that have at most `max_field_entries`."""


def check_counts(get: Callable[[str, None], Any], limits: RequestLimits) -> None:
    """Raise InvalidArgument, with the limit in `exceeded`, for a list or an object with too many entries.

    `get` returns the value of a field, or the default it is called with: the `get` of a mapping, or that of a record's
    attributes. The value need not have been checked, so that a request can be refused before a record is made of it.
    Only lengths are read.
    """
    if isinstance(prompt := get("prompt", None), list):
        _check_choices(prompt, get("n", None))
    for field, limit in _ENTRIES:
        if (found := get(field, None)) and isinstance(found, (list, dict)):
            _at_most(limit, len(found), getattr(limits, limit), field)
    if extension := get("nvext", None):
        for field in _EXTENSION_ENTRIES:
            found = extension.get(field) if isinstance(extension, dict) else getattr(extension, field, None)
            if isinstance(found, list):
                _at_most("max_field_entries", len(found), limits.max_field_entries, f"nvext.{field}")


def check_size(request: GenerationRequest, limits: RequestLimits) -> None:
    """Raise InvalidArgument, with the limit in `exceeded`, for the first limit that the request is beyond.

    The cost is that of counting: nothing is copied.
    """
    check_counts(partial(getattr, request), limits)
    if isinstance(request, ChatCompletionRequest):
        field, (characters, parts) = "messages", _of_messages(request.messages)
        _at_most("max_content_parts", parts, limits.max_content_parts, "messages", "content parts")
        _check_tool_calls(request.messages, limits.max_tool_call_characters)
    else:
        field, characters = "prompt", _characters(request)
    _at_most("max_prompt_characters", characters, limits.max_prompt_characters, field, "characters")
    _at_most("max_token_ids", _token_ids(request), limits.max_token_ids, "prompt", "token ids")
    _check_stops(request.stop, limits.max_stop_characters)


def _check_tool_calls(messages: Sequence[ChatMessage], threshold: int) -> None:
    """Their arguments are read as JSON, each in one piece."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.tool_calls or ()):
            field = f"messages[{i}].tool_calls[{j}].function.arguments"
            _at_most("max_tool_call_characters", len(call.function.arguments), threshold, field, "characters")


def _check_stops(stop: str | Sequence[str | int] | None, threshold: int) -> None:
    for place, entry in enumerate((stop,) if isinstance(stop, str) else stop or ()):
        if isinstance(entry, str):
            field = "stop" if isinstance(stop, str) else f"stop[{place}]"
            _at_most("max_stop_characters", len(entry), threshold, field, "characters")


def _check_choices(prompts: list[Any], n: Any) -> None:
    """Prompts times choices: each of them is answered as a request of its own."""
    batch = batch_size(prompts)
    n = n if type(n) is int and 1 <= n <= CHOICES_MAX else 1  # any other `n` is refused by itself
    if batch * n > CHOICES_MAX:
        product = f"batch_size × n = {batch} × {n} = {batch * n}"  # noqa: RUF001  # the client's wording
        text = f"Validation: Total choices ({product}) exceeds maximum of {CHOICES_MAX}"
        raise InvalidArgument(text, field="prompt", exceeded=ExceededLimit("max_choices", batch * n, CHOICES_MAX))


def _of_messages(messages: Sequence[ChatMessage]) -> tuple[int, int]:
    """The characters of every text that a template may write, and the number of content parts."""
    characters = parts = 0
    for message in messages:
        if isinstance(content := message.content, str):
            characters += len(content)
        elif content:
            parts += len(content)
            characters += sum(len(part.text) for part in content if part.text)
        if reasoning := message.reasoning_content:
            characters += len(reasoning) if isinstance(reasoning, str) else sum(map(len, reasoning))
        if message.tool_calls:
            characters += sum(len(call.function.arguments) for call in message.tool_calls)
    return characters, parts


def _characters(request: GenerationRequest) -> int:
    prompt = request.prompt if isinstance(request, CompletionRequest) else None
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(text) for text in prompt if isinstance(text, str)) if prompt and not _is_ids(prompt) else 0


def _token_ids(request: GenerationRequest) -> int:
    """How many token ids there are in all fields of the request."""
    ids = len(request.allowed_token_ids or ()) + len(request.logprob_token_ids or ())
    if request.bad_words_token_ids:
        ids += sum(map(len, request.bad_words_token_ids))
    if request.nvext is not None:
        ids += len(request.nvext.token_data or ())
    if isinstance(request, CompletionRequest) and isinstance(prompt := request.prompt, list) and prompt:
        ids += len(prompt) if _is_ids(prompt) else sum(len(each) for each in prompt if isinstance(each, list))
    return ids


def _is_ids(prompt: Sequence[Any]) -> bool:
    return isinstance(prompt[0], int)


def _at_most(name: str, value: int, threshold: int, field: str, what: str = "entries") -> None:
    if 0 < threshold < value:
        text = f"Validation: {field.capitalize()} must have at most {threshold} {what}, got {value}"
        raise InvalidArgument(text, field=field, exceeded=ExceededLimit(name, value, threshold))


def batch_size(found: Prompt | None) -> int:
    """How many prompts there are in a completion request's `prompt`."""
    return 1 if found is None or isinstance(found, str) or (found and _is_ids(found)) else len(found)


# -- how much work a prompt is

_MESSAGE_CHARACTERS = 16
"""A message costs a template what so many characters cost a tokenizer."""
_TOOL_CHARACTERS = 256
"""A tool, its own JSON aside, likewise."""


def prompt_characters(request: ChatCompletionRequest | CompletionRequest, enough: int) -> int:
    """Characters, or token ids, that the prompt is made of; counted no further than to beyond `enough`."""
    nvext = request.nvext
    if nvext is not None and nvext.token_data is not None and len(nvext.token_data) > enough:
        return len(nvext.token_data)
    if isinstance(request, ChatCompletionRequest):
        return _chat_characters(request, enough)
    prompt, embeds = request.prompt or (), request.prompt_embeds or ""
    entries = () if isinstance(prompt, str) or (prompt and _is_ids(prompt)) else prompt
    return len(prompt) + len(embeds) + sum(len(entry) for entry in entries if not isinstance(entry, int))


def _chat_characters(request: ChatCompletionRequest, enough: int) -> int:
    found = len(request.messages) * _MESSAGE_CHARACTERS + len(request.tools or ()) * _TOOL_CHARACTERS
    for message in request.messages:
        if found > enough:
            return found
        found += _message_characters(message, enough - found)
    for tool in request.tools or ():
        found += json_characters(tool.function.parameters, enough - found) + len(tool.function.description or "")
    if request.chat_template_args:
        found += json_characters(request.chat_template_args, enough - found)
    return found


def _message_characters(message: ChatMessage, enough: int) -> int:
    content = message.content
    if isinstance(content, list):
        found = sum(len(part.text or "") + _MESSAGE_CHARACTERS for part in content)
    else:
        found = len(content or "")
    found += sum(len(call.function.arguments) + _MESSAGE_CHARACTERS for call in message.tool_calls or ())
    others = message.reasoning_content, message.function_call, message.audio, message.extra
    if any(others):
        arguments = "" if message.function_call is None else message.function_call.arguments
        found += json_characters([message.reasoning_content, arguments, message.audio, message.extra], enough)
    return found


def json_characters(value: Any, enough: int) -> int:
    """About as many characters as the value has as JSON; counted no further than to beyond `enough`."""
    found, todo = 0, [value]
    while todo and found <= enough:
        each = todo.pop()
        if isinstance(each, str):
            found += len(each)
        elif isinstance(each, Mapping):
            found += sum(map(len, map(str, each)))
            todo.extend(each.values())
        elif isinstance(each, list):
            todo.extend(each)
        found += 4
    return found
