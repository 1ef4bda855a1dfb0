"""The first and the last item of an answer as MessagePack, without the general codec: the same bytes, in a fifth of the
time.

Each is an `Annotated[LLMEngineOutput]` of token ids, the index of its choice, a plain finish reason and counts of
tokens with at most those of the cache, and nothing else. The records here have its fields in the order of the general
codec. Any other item is left to that.
"""

from __future__ import annotations

from typing import Annotated as Marked
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..annotated import Annotated
from ..protocols import CompletionUsage, FinishReason, LLMEngineOutput, PromptTokensDetails
from ..protocols.field_rules import U32_MAX

_U32 = Marked[int, msgspec.Meta(ge=0, le=U32_MAX)]


class _Details(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    cached_tokens: _U32


class _Usage(Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    prompt_tokens: _U32
    completion_tokens: _U32
    total_tokens: _U32
    prompt_tokens_details: _Details | UnsetType = UNSET


class _Output(Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    token_ids: list[_U32]
    tokens: None
    text: None
    output_type: Literal["text"]
    cum_log_probs: None
    log_probs: None
    top_logprobs: None
    finish_reason: Literal["eos", "length", "stop", "cancelled", "content_filter"] | None
    index: _U32 | None
    completion_usage: _Usage | UnsetType = UNSET


class _Item(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    data: _Output


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Item]).decode


def end_to_msgpack(chunk: LLMEngineOutput) -> bytes | None:
    """Return the bytes of an item of this chunk, of which all but the fields named above is known to be not set.

    None if these hold something else than described there.
    """
    reason = chunk.finish_reason
    if reason is not None and reason.is_error:
        return None
    counts: _Usage | UnsetType = UNSET
    if (usage := chunk.completion_usage) is not None:
        cached = usage.prompt_tokens_details
        details: _Details | UnsetType = UNSET
        if usage.completion_tokens_details is not None:
            return None
        if cached is not None:
            if cached.cached_tokens is None or cached.audio_tokens is not None:
                return None
            details = _Details(cached.cached_tokens)
        counts = _Usage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, details)
    kind: Any = None if reason is None else reason.kind
    output = _Output(chunk.token_ids, None, None, "text", None, None, None, kind, chunk.index, counts)
    try:
        return _encode(_Item(output))
    except (TypeError, OverflowError):
        return None


def ends_from_msgpack(body: bytes) -> list[Annotated[LLMEngineOutput]] | None:
    """Return the items of a list of such items; None if one of them is another one."""
    try:
        return [Annotated(_chunk(item.data)) for item in _decode(body)]
    except ValueError:  # a DecodeError is one
        return None


def _chunk(output: _Output) -> LLMEngineOutput:
    chunk = LLMEngineOutput(output.token_ids, index=output.index)
    if output.finish_reason is not None:
        chunk.finish_reason = FinishReason.parse(output.finish_reason)
    if (counts := output.completion_usage) is not UNSET:
        details, cached = counts.prompt_tokens_details, None
        if details is not UNSET:
            cached = PromptTokensDetails(details.cached_tokens)
        chunk.completion_usage = CompletionUsage(
            counts.prompt_tokens, counts.completion_tokens, counts.total_tokens, cached
        )
    return chunk
