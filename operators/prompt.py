"""A request's prompt: its text as the model reads it, or the token ids it brings.

Source: dynamo lib/llm/src/preprocessor.rs, apply_template and gather_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from pipeline import InvalidArgument
from pipeline.codec import plain_from_json, to_plain
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage, CompletionRequest

from .chat_template import Message, never
from .model import Model
from .prompt_threads import GiveUp


def prompt_of(
    request: ChatCompletionRequest | CompletionRequest, model: Model, give_up: GiveUp = never
) -> str | list[int]:
    """The text to tokenize, without NUL characters, or token ids that are used as they are.

    A chat is rendered by the model's template unless `nvext.use_raw_prompt` asks for its texts alone. Raises
    InvalidArgument for several prompts in one request, and for what the template refuses.
    """
    found = _chat(request, model, give_up) if isinstance(request, ChatCompletionRequest) else _single(request)
    return found.replace("\0", "") if isinstance(found, str) else found


def _single(request: CompletionRequest) -> str | list[int]:
    """The one prompt of a completion request; no token ids where it has embeddings only."""
    prompt = request.prompt
    if prompt is None or isinstance(prompt, str):
        return prompt or []
    if _is_token_ids(prompt):
        return prompt
    if len(prompt) > 1:
        raise InvalidArgument(f"one prompt can be served at a time, got {len(prompt)}", field="prompt")
    (only,) = prompt
    assert not isinstance(only, int), "a list of ids was returned above"
    return only


def _is_token_ids(prompt: Sequence[Any]) -> TypeGuard[list[int]]:
    return not prompt or isinstance(prompt[0], int)  # the first shows it: no list holds both ids and texts


def _chat(request: ChatCompletionRequest, model: Model, give_up: GiveUp) -> str:
    if request.nvext is not None and request.nvext.use_raw_prompt:
        return "\n".join(_text(message) for message in request.messages)
    template = model.chat_template
    if template is None:
        raise InvalidArgument(f"model {model.name} has no chat template, so it cannot chat", field="messages")
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidArgument(
            "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
        )
    text = template.render(
        [_plain(message) for message in request.messages],
        tools=None if request.tool_choice == "none" else to_plain(request.tools),
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        args=_template_args(request),
        give_up=give_up,
    )
    return _open_ended(text, _text(request.messages[-1])) if continues else text


def _plain(message: ChatMessage) -> Message:
    """The message as templates expect it: unset fields left out, arguments of tool calls as objects."""
    plain: Message = to_plain(message)
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = plain_from_json(call["function"]["arguments"])
    return plain


def _text(message: ChatMessage) -> str:
    """The text of a message, of all its parts."""
    if isinstance(message.content, list):
        return "\n".join(part.text for part in message.content if part.text is not None)
    return message.content or ""


def _open_ended(prompt: str, last_text: str) -> str:
    """The prompt without what the template writes behind the last message, so that the answer continues it."""
    last_text = last_text.strip()
    at = prompt.rfind(last_text)
    if at < 0:
        raise InvalidArgument("the chat template changes the last message", field="continue_final_message")
    return prompt[: at + len(last_text)]


def _template_args(request: ChatCompletionRequest) -> dict[str, Any]:
    """Names for the template: whether and how hard to think, then what the request gives itself."""
    args: dict[str, Any] = {}
    thinking: object = request.thinking
    if isinstance(thinking, dict):
        thinking = thinking.get("type") != "disabled"
    if request.reasoning_effort is not None:
        args["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == "none":
            thinking = False
    if thinking is not None:
        args |= {"thinking": thinking, "enable_thinking": thinking}
    return args | (request.chat_template_args or {})
