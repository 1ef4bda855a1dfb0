"""What comes back: a chunk of an engine, the same after detokenizing, embeddings, prompt log probabilities.

The two chunk records are made once per token, so their constructors only store.

Source: dynamo lib/llm/src/protocols/common/llm_backend.rs.

FinishReason: why a choice ended, with its wire, text and OpenAI forms.

Source: dynamo lib/llm/src/protocols/common.rs, FinishReason.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

from attrs import define, evolve, frozen

from .field_rules import I64, U8, U32, InvalidRecord, null
from .timing import RoutingData, TraceLink
from .usage import CompletionUsage, ContentPart

_ERROR_PREFIX = "error: "
FinishKind = Literal["eos", "length", "stop", "cancelled", "content_filter", "error"]
OpenAIFinish = Literal["stop", "length", "content_filter"]


@frozen
class FinishReason:
    """One of five plain reasons, or an error with its message.

    On the wire a plain reason is its text and an error `{"error": message}`; also read are `abort` for cancelled and
    the text `error: message`. The text form (`str`) is read back by `parse`.
    """

    kind: FinishKind
    message: str = ""

    EOS: ClassVar[FinishReason]
    LENGTH: ClassVar[FinishReason]
    STOP: ClassVar[FinishReason]
    CANCELLED: ClassVar[FinishReason]
    CONTENT_FILTER: ClassVar[FinishReason]

    @classmethod
    def error(cls, message: str) -> FinishReason:
        """Return the reason of a failed choice. The message may be empty."""
        return cls("error", message)

    @property
    def is_error(self) -> bool:
        return self.kind == "error"

    @property
    def openai_completion(self) -> OpenAIFinish:
        """What the OpenAI completions protocol calls it; whatever it has no word for is a stop."""
        if self.kind == "length" or self.kind == "content_filter":
            return self.kind
        return "stop"

    def __str__(self) -> str:
        return _ERROR_PREFIX + self.message if self.is_error else self.kind

    @classmethod
    def parse(cls, text: str) -> FinishReason:
        """Return the reason in a text, without one error prefix. Raise InvalidRecord for any other text."""
        if (known := _BY_TEXT.get(text)) is not None:
            return known
        if text.startswith(_ERROR_PREFIX):
            return cls("error", text[len(_ERROR_PREFIX) :])
        raise InvalidRecord("expected a finish reason: " + ", ".join(_BY_TEXT) + f", or {_ERROR_PREFIX}<message>")

    def to_wire(self) -> str | dict[str, str]:
        return {"error": self.message} if self.kind == "error" else self.kind

    @classmethod
    def from_wire(cls, value: Any) -> FinishReason:
        """Raise InvalidRecord for unknown texts, `error` alone, and objects that are not exactly `{"error": text}`."""
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, dict) and value.keys() == {"error"}:
            if isinstance(value["error"], str):
                return cls("error", value["error"])
            raise InvalidRecord("expected a string", "error")
        raise InvalidRecord("expected a finish reason as text or an object with the one key error")


FinishReason.EOS = FinishReason("eos")
FinishReason.LENGTH = FinishReason("length")
FinishReason.STOP = FinishReason("stop")
FinishReason.CANCELLED = FinishReason("cancelled")
FinishReason.CONTENT_FILTER = FinishReason("content_filter")

_BY_TEXT = {
    "eos": FinishReason.EOS,
    "length": FinishReason.LENGTH,
    "stop": FinishReason.STOP,
    "cancelled": FinishReason.CANCELLED,
    "abort": FinishReason.CANCELLED,
    "content_filter": FinishReason.CONTENT_FILTER,
}


OutputType = Literal["text", "image", "video", "audio"]


@define(slots=True)
class TopLogprob:
    """One candidate for a position: its rank (1 is the most likely) and natural log probability."""

    rank: U32
    token_id: U32
    logprob: float
    token: str | None = null()
    bytes: list[U8] | None = None


@define(slots=True)
class LLMEngineOutput:
    """One chunk of an engine's stream. The chunk with a finish reason is the last of its choice."""

    token_ids: list[U32]
    """The tokens new in this chunk."""
    tokens: list[str | None] | None = null()
    """Their texts, from engines that decode."""
    text: str | None = null()
    """Text of the chunk, from engines that decode."""
    output_type: OutputType = "text"
    content_parts: list[ContentPart] | None = None
    cum_log_probs: float | None = null()
    """Sum of the log probabilities so far."""
    log_probs: list[float] | None = null()
    """Log probability of each token."""
    top_logprobs: list[list[TopLogprob]] | None = null()
    """Candidates for each token."""
    finish_reason: FinishReason | None = null()
    stop_reason: I64 | str | None = None
    """The stop id or stop string that was met."""
    index: U32 | None = null()
    """The choice that the chunk belongs to."""
    disaggregated_params: Any = None
    """Of a prefill worker: parameters for the decode worker."""
    encoder_result: dict[str, Any] | None = None
    """Result of an encode worker."""
    extra_args: Any = None
    engine_data: Any = None
    """Opaque data of the engine, passed to the client if requested."""
    worker_trace_link: TraceLink | None = None
    """Span of the worker."""
    completion_usage: CompletionUsage | None = None
    """Token counts, usually in the last chunk."""
    routing_data: RoutingData | None = None
    """The router's report, if requested."""

    @classmethod
    def token(cls, token_id: int) -> LLMEngineOutput:
        """Return a chunk of one token and nothing else."""
        return cls([token_id])

    @classmethod
    def cancelled(cls) -> LLMEngineOutput:
        """Return the last chunk of a cancelled choice."""
        return cls([], finish_reason=FinishReason.CANCELLED)

    @classmethod
    def stop(cls) -> LLMEngineOutput:
        """Return the last chunk of a choice that met a stop condition."""
        return cls([], finish_reason=FinishReason.STOP)

    @classmethod
    def length(cls) -> LLMEngineOutput:
        """Return the last chunk of a choice that reached its token limit."""
        return cls([], finish_reason=FinishReason.LENGTH)

    @classmethod
    def error(cls, message: str) -> LLMEngineOutput:
        """Return the last chunk of a choice that failed."""
        return cls([], finish_reason=FinishReason.error(message))

    @classmethod
    def encode_terminal(cls, encoder_result: dict[str, Any]) -> LLMEngineOutput:
        """Return the only chunk of an encoder: no tokens, index 0, its result."""
        return cls([], finish_reason=FinishReason.STOP, index=0, encoder_result=encoder_result)

    @property
    def error_message(self) -> str | None:
        """The message if the finish reason is an error, else None."""
        reason = self.finish_reason
        return reason.message if reason is not None and reason.is_error else None

    def with_tokens(self, token_ids: list[int]) -> LLMEngineOutput:
        """Return a copy with these tokens."""
        return evolve(self, token_ids=token_ids)

    def with_usage(self, usage: CompletionUsage) -> LLMEngineOutput:
        """Return a copy with these counts."""
        return evolve(self, completion_usage=usage)

    def with_encoder_result(self, encoder_result: dict[str, Any]) -> LLMEngineOutput:
        """Return a copy with this encoder result."""
        return evolve(self, encoder_result=encoder_result)


@define(slots=True)
class BackendOutput:
    """A chunk after detokenizing; fields as in `LLMEngineOutput`."""

    token_ids: list[U32]
    tokens: list[str | None]
    """The text of each token; None for a token that is not shown."""
    text: str | None = null()
    cum_log_probs: float | None = null()
    log_probs: list[float] | None = null()
    top_logprobs: list[list[TopLogprob]] | None = null()
    finish_reason: FinishReason | None = null()
    stop_reason: I64 | str | None = None
    index: U32 | None = null()
    completion_usage: CompletionUsage | None = None
    disaggregated_params: Any = None
    encoder_result: dict[str, Any] | None = None
    worker_trace_link: TraceLink | None = None
    engine_data: Any = None
    routing_data: RoutingData | None = None


@define(slots=True)
class EmbeddingsEngineOutput:
    """One vector per input."""

    embeddings: list[list[float]]
    prompt_tokens: U32
    total_tokens: U32


@define(slots=True)
class PromptLogprobEntry:
    """The log probability of one token at one prompt position."""

    logprob: float
    rank: U32 | None = None
    decoded_token: str | None = None


PromptLogprobs: TypeAlias = list[dict[U32, PromptLogprobEntry] | None]
"""One map from token id to its entry per prompt position; None where there is none (the first position)."""
