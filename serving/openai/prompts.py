"""The prompts of an OpenAI request, and one request for each of them."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard, cast

from attrs import evolve

from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest

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
