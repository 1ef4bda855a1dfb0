"""Splitting a completion request into one request for each of its prompts."""

from __future__ import annotations

from typing import TypeGuard, cast

from attrs import evolve

from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest

OpenAIRequest = ChatCompletionRequest | CompletionRequest


def one_per_prompt(request: OpenAIRequest) -> list[OpenAIRequest]:
    """The requests that an engine answers one by one: a list of texts or of token lists is taken apart.

    A chat, a text, and a list of token ids are one prompt each. An empty list stays, for validation to refuse it.
    Each prompt costs a copy of the request, so count the prompts before.
    """
    if not has_prompts(request):
        return [request]
    return [evolve(request, prompt=each) for each in cast("list[str | list[int]]", request.prompt)]


def has_prompts(request: OpenAIRequest) -> TypeGuard[CompletionRequest]:
    """Whether the request has a list of prompts, be it of one."""
    prompt = request.prompt if isinstance(request, CompletionRequest) else None
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
