"""Items of a token stream as records of msgspec, which reads a list of them in one call: the same bytes as the general
codec, in a quarter of the time.

Each is an `Annotated[LLMEngineOutput]` of token ids, the index of its choice, a plain finish reason and counts of
tokens with at most those of the cache, and nothing else: nearly all items of a stream, the first and the last included.
The records have its fields in the order of the general codec, to which any other item is left. The usual item, of token
ids and index alone, may also be short: a list of these two.
"""

from __future__ import annotations

from typing import Annotated as Marked
from typing import Any, Final, Literal, TypeAlias

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


class TypedOutput(Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """The data of an item."""

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

    def chunk(self) -> LLMEngineOutput:
        """Return the record of an engine."""
        chunk = LLMEngineOutput(self.token_ids)
        if self.index is not None:
            chunk.index = self.index
        if self.finish_reason is not None:
            chunk.finish_reason = FinishReason.parse(self.finish_reason)
        if (counts := self.completion_usage) is not UNSET:
            details = counts.prompt_tokens_details
            cached = None if details is UNSET else PromptTokensDetails(details.cached_tokens)
            numbers = counts.prompt_tokens, counts.completion_tokens, counts.total_tokens
            chunk.completion_usage = CompletionUsage(*numbers, cached)
        return chunk


class TypedItem(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An item."""

    data: TypedOutput


ShortItem: TypeAlias = tuple[list[_U32], _U32 | None]
"""Token ids and index."""

_encode = msgspec.msgpack.Encoder().encode
typed_items: Final = msgspec.msgpack.Decoder(list[ShortItem | TypedItem]).decode
"""Returns the items of a MessagePack list; raises ValueError if one of them is another one."""

lone_token: Final = msgspec.msgpack.Decoder(tuple[tuple[tuple[_U32], _U32 | None]]).decode
"""Returns the only item of a MessagePack list, a short one of one token; raises ValueError if it is another list."""


def short_item(plain: list[Any]) -> ShortItem:
    """Return the short item that a MessagePack list is. Raise ValueError if it is none."""
    token_ids, index = msgspec.convert(plain, ShortItem)
    return token_ids, index


def item_of(found: ShortItem | TypedItem) -> Annotated[LLMEngineOutput]:
    """Return the item of a stream."""
    if isinstance(found, tuple):
        token_ids, index = found
        return Annotated(LLMEngineOutput(token_ids, index=index))
    return Annotated(found.data.chunk())


def typed_to_msgpack(chunk: LLMEngineOutput) -> bytes | None:
    """Return the bytes of an item of this chunk, of which all but the fields named above is known to be not set.

    None if these hold something else than described there.
    """
    reason, usage = chunk.finish_reason, chunk.completion_usage
    if reason is not None and reason.is_error:
        return None
    counts: _Usage | UnsetType = UNSET
    if usage is not None:
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
    output = TypedOutput(chunk.token_ids, None, None, "text", None, None, None, kind, chunk.index, counts)
    try:
        return _encode(TypedItem(output))
    except (TypeError, OverflowError):
        return None
