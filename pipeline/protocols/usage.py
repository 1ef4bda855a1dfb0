"""Token counts of a request, as OpenAI reports them.

Source: dynamo lib/protocols, CompletionUsage; saturating sums of lib/backend-common, usage.

Parts of a message or of an output: text, links to media, inline audio.

Source: dynamo lib/protocols, chat message content parts; lib/llm/src/protocols/common/llm_backend.rs, content parts.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from attrs import define

from .field_rules import U32, U32_MAX, InvalidRecord, needs


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


ContentKind = Literal["text", "image_url", "video_url", "audio_url", "input_audio", "refusal"]


@define(slots=True)
class MediaUrl:
    """Where a picture, film or sound is found: http(s) or data URL."""

    url: str
    detail: str | None = None
    uuid: str | None = None


@define(slots=True)
class InputAudio:
    """Sound inside the request: base64 `data` in `format`."""

    data: str
    format: str


@define(slots=True)
class ContentPart:
    """One part; the field named like `type` holds it. Raises InvalidRecord if that field is not set."""

    wire_needs: ClassVar[dict[str, Any]] = needs("type", {kind: (kind,) for kind in get_args(ContentKind)})

    type: ContentKind
    text: str | None = None
    image_url: MediaUrl | None = None
    video_url: MediaUrl | None = None
    audio_url: MediaUrl | None = None
    input_audio: InputAudio | None = None
    refusal: str | None = None
    uuid: str | None = None

    def __attrs_post_init__(self) -> None:
        if getattr(self, self.type) is None:
            raise InvalidRecord(f"is required in a part of type {self.type}", self.type)
