"""PromptThreads: the threads in which long prompts are prepared, and how stages below find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pipeline import AnyContext, Control, ResourceExhausted
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import PromptWork
from pipeline.threads import GiveUp, WorkThreads

T = TypeVar("T")

_KEY = "prompt_threads"


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
