"""A prompt's text to token ids, piece by piece; no further than the model can take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from pipeline import InvalidArgument
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import RequestLimits
from pipeline.threads import GiveUp

from .chat_template import never
from .model import Model
from .tokenizer import CutsText, checked_unicode

_IDS_AT_ONCE = 16_384
"""Token ids that are written in one step."""
_CHARACTERS_AT_ONCE = 262_144


def encoded(model: Model, place: str, limits: RequestLimits, give_up: GiveUp, text: str) -> list[int]:
    """The ids of the text, which came in the field `place`. `give_up` is called between two pieces, and may raise.

    Raises as `Tokenizer.encode` and `CutsText.pieces`, and InvalidArgument once there are more than the model takes, or
    than `limits.max_prompt_tokens`.
    """
    if give_up is never:
        token_ids = model.tokenizer.encode(text)
        _check_count(token_ids, limits.max_prompt_tokens, place)
        return token_ids
    checked_unicode(text)
    most = model.context_length if model.reject_prompt_overflow else None
    token_ids = []
    for piece in _pieces(model, text, limits.max_unbroken_characters):
        if most is not None and len(token_ids) >= most:
            raise beyond_context(model, f"at least {len(token_ids)}", place)
        token_ids += model.tokenizer.encode(piece)
        _check_count(token_ids, limits.max_prompt_tokens, place)
        give_up()
    return token_ids


def _check_count(token_ids: Sequence[int], limit: int, place: str) -> None:
    if 0 < limit < len(token_ids):
        exceeded = ExceededLimit("max_prompt_tokens", len(token_ids), limit)
        raise InvalidArgument(f"the prompt has more than {limit} tokens", field=place, exceeded=exceeded)


def beyond_context(model: Model, count: str, place: str) -> InvalidArgument:
    """The error for a prompt, in the field `place`, of so many tokens, which are more than the model takes."""
    return InvalidArgument(
        f"This model's maximum context length is {model.context_length} tokens. However, your messages resulted in "
        f"{count} tokens. Please reduce the length of the messages.",
        field=place,
    )


def json_of_ids(token_ids: Sequence[int]) -> str:
    """The ids as a JSON list, written in steps between which other threads run."""
    steps = (token_ids[at : at + _IDS_AT_ONCE] for at in range(0, len(token_ids), _IDS_AT_ONCE))
    return f"[{','.join(','.join(map(str, step)) for step in steps)}]"


def json_of_text(text: str) -> str:
    """The text as JSON, written in such steps too."""
    steps = (text[at : at + _CHARACTERS_AT_ONCE] for at in range(0, len(text), _CHARACTERS_AT_ONCE))
    return f'"{"".join(json.dumps(step, ensure_ascii=False)[1:-1] for step in steps)}"'


def _pieces(model: Model, text: str, unbroken_max: int) -> Iterator[str]:
    if isinstance(model.tokenizer, CutsText):
        return model.tokenizer.pieces(text, unbroken_max)
    return iter((text,))
