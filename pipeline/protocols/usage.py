"""Token counts of a request, as OpenAI reports them.

Source: dynamo lib/protocols, CompletionUsage; saturating sums of lib/backend-common, usage.
"""

from __future__ import annotations

from attrs import define

from .wire import U32, U32_MAX


@define(slots=True)
class PromptTokensDetails:
    """Where prompt tokens came from."""

    cached_tokens: U32 | None = None
    audio_tokens: U32 | None = None


@define(slots=True)
class CompletionTokensDetails:
    """What completion tokens were spent on."""

    reasoning_tokens: U32 | None = None
    audio_tokens: U32 | None = None
    accepted_prediction_tokens: U32 | None = None
    rejected_prediction_tokens: U32 | None = None


@define(slots=True)
class CompletionUsage:
    """Prompt, completion and total tokens."""

    prompt_tokens: U32
    completion_tokens: U32
    total_tokens: U32
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> CompletionUsage:
        """Both counts and their sum; each ends at the largest u32 instead of overflowing."""
        prompt, completion = min(prompt_tokens, U32_MAX), min(completion_tokens, U32_MAX)
        return cls(prompt, completion, min(prompt + completion, U32_MAX))
