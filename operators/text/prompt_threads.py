"""Long prompts: the threads in which they are prepared, and their text to token ids, piece by piece.

PromptThreads: within limits of their own; stages below find them by `offered_threads`. `encoded` goes no further than
the model can take.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pipeline import AnyContext, Control, InvalidArgument, ResourceExhausted
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.threads import GiveUp, WorkThreads

from .chat_template import never
from .model import Model
from .tokenizer import CutsText, checked_unicode

T = TypeVar("T")

_KEY = "prompt_threads"
_IDS_AT_ONCE = 16_384
"""Token ids that are written in one step."""
_CHARACTERS_AT_ONCE = 262_144


class TooManyPrompts(ResourceExhausted):
    """As many long prompts wait for a thread as may. `retry_after_s` is when to try again."""

    retry_after_s = 1.0


class PromptThreads:
    """Threads for long prompts, within limits that hold for each loop. One object may serve several graphs."""

    def __init__(self, settings: PromptWork | None = None) -> None:
        self.settings = PromptWork() if settings is None else settings
        self._threads = WorkThreads(self.settings.tokenizer_threads)

    def is_long(self, characters: int) -> bool:
        """Return whether work on a text of so many characters, or on as many token ids, belongs in a thread."""
        return characters > self.settings.inline_prompt_characters

    async def run(self, work: Callable[[GiveUp], T], control: Control) -> T:
        """Run work as `WorkThreads.run`. Raise TooManyPrompts, at once, beyond `max_waiting_prompts`."""
        waiting, limit = self._threads.waiting(), self.settings.max_waiting_prompts
        if limit and waiting is not None and waiting >= limit:
            text = f"{waiting} long prompts wait for a thread, which is as many as may"
            raise TooManyPrompts(text, exceeded=ExceededLimit("max_waiting_prompts", waiting + 1, limit))
        return await self._threads.run(work, control)


def offer_threads(request: AnyContext, threads: PromptThreads) -> None:
    """Let the stages below do their work on a long prompt in the same threads."""
    request.registry.insert_shared(_KEY, threads)


def offered_threads(request: AnyContext) -> PromptThreads | None:
    """Return the threads for a long prompt, None if the prompt is short or no stage above has any."""
    return request.registry.get_optional(_KEY, PromptThreads)


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
