"""Splitting a completion request into one request for each of its prompts."""

from __future__ import annotations

from typing import cast

from attrs import evolve

from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest

OpenAIRequest = ChatCompletionRequest | CompletionRequest


def one_per_prompt(request: OpenAIRequest) -> list[OpenAIRequest]:
    """The requests that an engine answers one by one: a list of texts or of token lists is taken apart.

    A chat, a text, and a list of token ids are one prompt each. An empty list stays, for validation to refuse it.
    """
    if not isinstance(request, CompletionRequest):
        return [request]
    prompt = request.prompt
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return [request]
    return [evolve(request, prompt=each) for each in cast("list[str | list[int]]", prompt)]
