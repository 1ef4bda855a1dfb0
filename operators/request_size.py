"""How much a request holds, before anything is made of it: see `RequestLimits`."""

from __future__ import annotations

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, GenerationRequest


def check_size(request: GenerationRequest, limits: RequestLimits) -> None:
    """Raise InvalidArgument, with the limit in `exceeded`, for the first limit that the request is beyond.

    The cost is that of counting: nothing is copied.
    """
    if isinstance(request, ChatCompletionRequest):
        _at_most("max_tools", len(request.tools or ()), limits.max_tools, "tools")


def _at_most(name: str, value: int, threshold: int, field: str) -> None:
    if 0 < threshold < value:
        text = f"Validation: {field.capitalize()} must have at most {threshold} entries, got {value}"
        raise InvalidArgument(text, field=field, exceeded=ExceededLimit(name, value, threshold))
