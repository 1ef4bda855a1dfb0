"""Probes: small requests that show that an engine works, known by their marker.

    payload ──stamp──► {..., "_HEALTH_CHECK": true} ──ProbeEngine──► adapter ──► engine

Source: dynamo lib/backend-common/src/health.rs and components/src/dynamo/health_check.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from pipeline import Annotated, AsyncEngine, Context, InvalidArgument, ResponseStream
from pipeline.codec import from_json, from_plain
from pipeline.errors import BackendUnknown
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

HEALTH_CHECK_KEY = "_HEALTH_CHECK"


def health_payload(bos_token_id: int = 1, **extra: Any) -> dict[str, Any]:
    """A request for one token after the one that begins a text, not marked yet; `extra` fields are added."""
    return {
        "token_ids": [bos_token_id],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
    } | extra


def stamp(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the marker of a probe."""
    return {**payload, HEALTH_CHECK_KEY: True}


def is_probe(request: Mapping[str, Any]) -> bool:
    """Whether the marker is there and exactly true."""
    return request.get(HEALTH_CHECK_KEY) is True


def bos_token_id(tokenizer: Any, default: int = 1) -> int:
    """The id of the token that begins a text: the object's own, else its tokenizer's, else the default."""
    for owner in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        found = getattr(owner, "bos_token_id", None)
        if found is not None:
            return int(found)
    return default


def payload_from_text(text: str | None) -> dict[str, Any] | None:
    """A payload given as a JSON object, or as `@file` that holds one; None for anything else."""
    if text is None or not text.strip():
        return None
    try:
        content = Path(text.strip()[1:]).read_text() if text.strip().startswith("@") else text
        return from_json(content, dict[str, Any])
    except (InvalidArgument, OSError, UnicodeDecodeError):
        return None


class ProbeEngine(AsyncEngine[Any, Annotated[LLMEngineOutput]]):
    """Takes probes as plain values, reads them, and asks the engine behind it.

    A payload that is no request, and a chunk that finished with an error, come as error items, so that a canary sees
    them fail.
    """

    def __init__(self, engine: AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]) -> None:
        self._engine = engine

    async def generate(self, request: Context[Any]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        try:
            probe = from_plain(request.payload, PreprocessedRequest)
        except InvalidArgument as error:
            return ResponseStream.of([Annotated.from_error(error)], request)
        stream = await self._engine.generate(request.with_payload(probe))
        return ResponseStream(_failing(stream), request, stream)


async def _failing(
    stream: ResponseStream[Annotated[LLMEngineOutput]],
) -> AsyncGenerator[Annotated[LLMEngineOutput], None]:
    async with stream:
        async for item in stream:
            if item.data is not None and (message := item.data.error_message) is not None:
                yield Annotated.from_error(BackendUnknown(message))
                return
            yield item
