"""FinishReason: why a choice ended, with its wire, text and OpenAI forms.

Source: dynamo lib/llm/src/protocols/common.rs, FinishReason.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from attrs import frozen

from .wire import InvalidRecord

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
        """The choice failed; an empty message is allowed."""
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
        """The reason a text stands for; only one error prefix is taken off. Raises InvalidRecord for any other text."""
        if (known := _BY_TEXT.get(text)) is not None:
            return known
        if text.startswith(_ERROR_PREFIX):
            return cls("error", text[len(_ERROR_PREFIX) :])
        raise InvalidRecord("expected a finish reason: " + ", ".join(_BY_TEXT) + f", or {_ERROR_PREFIX}<message>")

    def to_wire(self) -> str | dict[str, str]:
        return {"error": self.message} if self.kind == "error" else self.kind

    @classmethod
    def from_wire(cls, value: Any) -> FinishReason:
        """Raises InvalidRecord for unknown texts, `error` alone, and objects that are not exactly `{"error": text}`."""
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
