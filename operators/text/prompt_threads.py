"""PromptThreads: the work that long prompts take, in threads beside the event loop.

    await threads.run(work, control) ──► a free thread, or a place in the queue, or TooManyPrompts

What a long prompt costs would otherwise be one pause for every stream of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import Lock
from typing import Any, Generic, TypeVar, cast

from anyio import CancelScope, CapacityLimiter, to_thread

from pipeline import AnyContext, Cancelled, Control, ResourceExhausted
from pipeline.errors import ExceededLimit
from pipeline.loop import call_soon, running_loop, time_held
from pipeline.protocols.limits import PromptWork

T = TypeVar("T")

GiveUp = Callable[[], None]
"""Called by work now and then; ends it, by an exception of its own, once nothing waits for it any more."""


class TooManyPrompts(ResourceExhausted):
    """As many long prompts wait for a thread as may; trying again makes sense after `retry_after_s`."""

    retry_after_s = 1.0


class PromptThreads:
    """Threads for long prompts: so many at a time, the others wait in the order they came.

    One object may serve several graphs and loops; the limits hold for each loop.
    """

    def __init__(self, settings: PromptWork | None = None) -> None:
        self.settings = PromptWork() if settings is None else settings
        self._places: tuple[Any, CapacityLimiter, CapacityLimiter] | None = None

    def is_long(self, characters: int) -> bool:
        """Whether work on a text of so many characters, or on as many token ids, belongs in a thread."""
        return characters > self.settings.inline_prompt_characters

    async def run(self, work: Callable[[GiveUp], T], control: Control) -> T:
        """Return what `work` returns, called in a thread; an error of any kind is raised as it came.

        Raise TooManyPrompts, at once, if no thread is free and `max_waiting_prompts` wait; Cancelled as soon as
        `control` is stopped or killed. A stop, a kill or a cancelled task does not wait for the thread, which keeps its
        place among `tokenizer_threads` until the work has ended: at its next call of `GiveUp`.
        """
        threads, unlimited = self._of_this_loop()
        self._check_room(threads)
        job = _Job(work, threads)
        with CancelScope() as scope:
            forget = control.on_stop(scope.cancel)
            try:
                await threads.acquire_on_behalf_of(job)
                job.has_place = True
                with time_held():
                    await to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=unlimited)
            finally:
                forget()
                job.leave()
        if scope.cancelled_caught:
            raise Cancelled("the request was stopped while its prompt was prepared")
        return job.result()

    def _check_room(self, threads: CapacityLimiter) -> None:
        limit = self.settings.max_waiting_prompts
        if not limit or threads.available_tokens > 0:
            return
        waiting = threads.statistics().tasks_waiting
        if waiting >= limit:
            text = f"{waiting} long prompts wait for a thread, which is as many as may"
            raise TooManyPrompts(text, exceeded=ExceededLimit("max_waiting_prompts", waiting + 1, limit))

    def _of_this_loop(self) -> tuple[CapacityLimiter, CapacityLimiter]:
        """The places there are, and a limiter that lets all pass: anyio's own would be shared with other users.

        anyio gives a thread's place back when the task that waits for it is cancelled, and the thread may then still
        be busy; so places are counted here.
        """
        loop = running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, CapacityLimiter(self.settings.tokenizer_threads), CapacityLimiter(inf)
        return self._places[1:]


_KEY = "prompt_threads"


def offer_threads(request: AnyContext, threads: PromptThreads) -> None:
    """Let the stages below do in the same threads what a long prompt costs them."""
    request.registry.insert_shared(_KEY, threads)


def offered_threads(request: AnyContext) -> PromptThreads | None:
    """Return the threads for a long prompt, None if the prompt is short or no stage above has any."""
    return request.registry.get_optional(_KEY, PromptThreads)


class _GivenUp(Exception):
    """Ends work that nothing waits for."""


class _Job(Generic[T]):
    """One piece of work. Its place is given back once: by the thread if that has begun, else by the task."""

    def __init__(self, work: Callable[[GiveUp], T], threads: CapacityLimiter) -> None:
        self.has_place = False
        self._work, self._threads, self._loop = work, threads, running_loop()
        self._lock = Lock()
        self._has_begun = self._is_left = False
        self._outcome: tuple[T | None, BaseException | None] = None, None

    def run(self) -> None:
        """The thread's part."""
        with self._lock:
            if self._is_left:
                return
            self._has_begun = True
        try:
            self._outcome = self._work(self._give_up), None
        except BaseException as error:  # raised in the task, which knows what is foreign and what is not
            self._outcome = None, error
        finally:
            call_soon(self._loop, self._release)

    def leave(self) -> None:
        """Called by the task when it waits no longer."""
        with self._lock:
            self._is_left = True
            is_free = self.has_place and not self._has_begun
        if is_free:
            self._release()

    def result(self) -> T:
        value, error = self._outcome
        if error is not None:
            raise error
        return cast("T", value)

    def _give_up(self) -> None:
        if self._is_left:
            raise _GivenUp

    def _release(self) -> None:
        self._threads.release_on_behalf_of(self)
