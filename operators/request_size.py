"""How much a request holds, before anything is made of it: see `RequestLimits`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest

from .request_checks import CHOICES_MAX, batch_size

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


def check_counts(get: Callable[[str], Any], limits: RequestLimits) -> None:
    """Raise InvalidArgument, with the limit in `exceeded`, for a list or an object with too many entries.

    `get` returns a field's value, None without one. The value need not have been checked, so that a request can be
    refused before a record is made of it. The cost is that of asking for lengths.
    """
    _check_choices(get("prompt"), get("n"))
    for field, limit in _ENTRIES:
        if isinstance(found := get(field), list | dict):
            _at_most(limit, len(found), getattr(limits, limit), field)
    if (extension := get("nvext")) is not None:
        for field in _EXTENSION_ENTRIES:
            if isinstance(found := _field(extension, field), list):
                _at_most("max_field_entries", len(found), limits.max_field_entries, f"nvext.{field}")
    if isinstance(messages := get("messages"), list):
        parts = sum(len(found) for each in messages if isinstance(found := _field(each, "content"), list))
        _at_most("max_content_parts", parts, limits.max_content_parts, "messages", "content parts")


def check_size(request: GenerationRequest, limits: RequestLimits) -> None:
    """Raise InvalidArgument, with the limit in `exceeded`, for the first limit that the request is beyond.

    The cost is that of counting: nothing is copied.
    """
    check_counts(partial(_field, request), limits)
    field = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    characters = sum(map(len, _texts(request)))
    _at_most("max_prompt_characters", characters, limits.max_prompt_characters, field, "characters")
    _at_most("max_token_ids", sum(map(len, _token_ids(request))), limits.max_token_ids, "prompt", "token ids")
    _check_stops(request.stop, limits.max_stop_characters)


def _check_stops(stop: str | Sequence[str | int] | None, threshold: int) -> None:
    if stop is None or not threshold:
        return
    for place, entry in enumerate((stop,) if isinstance(stop, str) else stop):
        if isinstance(entry, str) and len(entry) > threshold:
            name = "stop" if isinstance(stop, str) else f"stop[{place}]"
            text = f"Validation: {name.capitalize()} must have at most {threshold} characters, got {len(entry)}"
            exceeded = ExceededLimit("max_stop_characters", len(entry), threshold)
            raise InvalidArgument(text, field=name, exceeded=exceeded)


def _field(record: Any, name: str) -> Any:
    return record.get(name) if isinstance(record, dict) else getattr(record, name, None)


def _check_choices(prompt: Any, n: Any) -> None:
    """Prompts times choices: each of them is answered as a request of its own."""
    if not isinstance(prompt, list):
        return
    batch = batch_size(prompt)
    n = n if type(n) is int and 1 <= n <= CHOICES_MAX else 1  # any other `n` is refused by itself
    if batch * n > CHOICES_MAX:
        product = f"batch_size × n = {batch} × {n} = {batch * n}"  # noqa: RUF001  # the client's wording
        text = f"Validation: Total choices ({product}) exceeds maximum of {CHOICES_MAX}"
        raise InvalidArgument(text, field="prompt", exceeded=ExceededLimit("max_choices", batch * n, CHOICES_MAX))


def _texts(request: GenerationRequest) -> Iterator[str]:
    """Every text that the prompt is made of."""
    if isinstance(request, CompletionRequest):
        if isinstance(request.prompt, str):
            yield request.prompt
        elif request.prompt and isinstance(request.prompt[0], str):
            yield from (text for text in request.prompt if isinstance(text, str))
    if not isinstance(request, ChatCompletionRequest):
        return
    for message in request.messages:
        for content in (message.content, message.reasoning_content):
            if isinstance(content, str):
                yield content
            elif content:
                yield from (text for part in content if (text := part if isinstance(part, str) else part.text))
        if message.tool_calls:
            yield from (call.function.arguments for call in message.tool_calls)


def _token_ids(request: GenerationRequest) -> Iterator[list[int]]:
    """Every list of token ids in the request."""
    prompt = request.prompt if isinstance(request, CompletionRequest) else None
    lists: list[Any] = [prompt, request.allowed_token_ids, request.logprob_token_ids]
    lists += request.bad_words_token_ids or ()
    if request.nvext is not None:
        lists.append(request.nvext.token_data)
    for found in lists:
        if not found or isinstance(found, str):
            continue
        yield from (found,) if isinstance(found[0], int) else (ids for ids in found if isinstance(ids, list))


def _at_most(name: str, value: int, threshold: int, field: str, what: str = "entries") -> None:
    if 0 < threshold < value:
        text = f"Validation: {field.capitalize()} must have at most {threshold} {what}, got {value}"
        raise InvalidArgument(text, field=field, exceeded=ExceededLimit(name, value, threshold))
