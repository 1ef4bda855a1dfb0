"""How much work a request's prompt is, found without doing it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage, CompletionRequest

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
    entries = () if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
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
