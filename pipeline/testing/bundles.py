"""Bundles: tokens in other items than the engine made, to see that no stage depends on how they are bundled.

engine: [1] [2] [3, end] ──► Bundles(2): [1, 2] [3, end]        Bundles(None): [1, 2, 3, end]
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from copy import copy
from typing import Any

from attrs import evolve

from ..annotated import Annotated
from ..cancellation import until_killed
from ..context import Context
from ..engine import AsyncEngine
from ..graph import link
from ..operator import PASSES_THROUGH, Operator
from ..protocols import BackendOutput, CompletionUsage, LLMEngineOutput
from ..stream import ResponseStream

_KINDS = (LLMEngineOutput, BackendOutput)
_LISTS = ("token_ids", "tokens", "log_probs", "top_logprobs")
"""Fields with an entry for each token."""
_PARTS = (
    "disaggregated_params",
    "encoder_result",
    "worker_trace_link",
    "engine_data",
    "routing_data",
    "content_parts",
    "extra_args",
)
"""Fields of an item that stays apart from the tokens before it."""


class Bundles(Operator[Any, Any, Any, Any]):
    """Joins and splits the items of each choice, so that each has `size` tokens, the last one fewer; None: all of them.

    The answer is the same: tokens, log probabilities, texts, usage and finish reason, errors behind the tokens before
    them. Tokens are held back until there are enough, or the stream ends, also while the engine pauses: for tests only.
    Items with a text are joined and never split. Any other item, of another class or with more than tokens, stays as it
    is, behind the tokens that were held.
    """

    declares = PASSES_THROUGH

    def __init__(self, size: int | None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"a bundle has at least one token, not {size}")
        self.size = size

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        stream = await next.generate(request)
        return self.of(stream, request)

    def of(self, stream: ResponseStream[Any], request: Context[Any]) -> ResponseStream[Any]:
        """Return the stream of a request, bundled."""
        return ResponseStream(until_killed(self._items(stream), request), request, stream)

    async def _items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        held = _Held(self.size)
        async with stream:
            try:
                async for item in stream:
                    for ready in held.put(item):
                        yield ready
            except Exception:
                for ready in held.take():
                    yield ready
                raise
            for ready in held.take():
                yield ready


def bundled(engine: AsyncEngine[Any, Any], size: int | None) -> AsyncEngine[Any, Any]:
    """Return the engine with its tokens in bundles of that size: see `Bundles`."""
    return link(Bundles(size), engine)


class _Held:
    """Items of each choice that wait for more tokens."""

    def __init__(self, size: int | None) -> None:
        self._size = size
        self._waiting: dict[int | None, Any] = {}

    def put(self, item: Any) -> Iterator[Any]:
        """Add an item; return those that are ready."""
        data: Any = item.data if isinstance(item, Annotated) and _is_plain(item) else None
        if type(data) not in _KINDS:
            yield from self.take()
            yield item
            return
        whole = self._waiting.pop(data.index, None)
        if whole is not None and not _may_join(whole, data):
            yield Annotated(whole)
            whole = None
        if whole is None:
            whole = _copied(data)
        else:
            _join(whole, data)
        size = self._size or len(whole.token_ids) + 1
        while whole.text is None and len(whole.token_ids) > size:
            first, whole = _split(whole, size)
            yield Annotated(first)
        if whole.finish_reason is not None or len(whole.token_ids) >= size:
            yield Annotated(whole)
        else:
            self._waiting[data.index] = whole

    def take(self) -> Iterator[Any]:
        """Remove and return all items that wait."""
        waiting, self._waiting = self._waiting, {}
        for data in waiting.values():
            yield Annotated(data)


def _is_plain(item: Annotated[Any]) -> bool:
    return item.event is None and item.comment is None and item.id is None and item.error is None


def _may_join(before: Any, data: Any) -> bool:
    """Whether the item goes behind the tokens of the one before it: it has nothing but tokens and an ending."""
    if type(before) is not type(data) or (before.text is None) != (data.text is None):
        return False
    if any(getattr(data, name, None) is not None for name in _PARTS):
        return False
    if not data.token_ids or not before.token_ids:
        return True
    same = ("log_probs", "top_logprobs", "cum_log_probs")
    return all((getattr(before, name) is None) == (getattr(data, name) is None) for name in same)


def _copied(data: Any) -> Any:
    """Return a copy with lists of its own."""
    whole = copy(data)
    for name in _LISTS:
        if (known := getattr(data, name)) is not None:
            setattr(whole, name, list(known))
    return whole


def _join(whole: Any, data: Any) -> None:
    """Put an item's tokens and ending behind those of the first, which is changed."""
    for name in _LISTS:
        known, more = getattr(whole, name), getattr(data, name)
        if more is not None and data.token_ids:
            setattr(whole, name, list(more)) if known is None else known.extend(more)
    if data.text is not None:
        whole.text += data.text
    if data.cum_log_probs is not None:
        whole.cum_log_probs = data.cum_log_probs
    whole.finish_reason, whole.stop_reason = data.finish_reason, data.stop_reason
    if data.completion_usage is not None:
        whole.completion_usage = data.completion_usage
    elif (usage := whole.completion_usage) is not None:
        whole.completion_usage = _counted(usage, len(data.token_ids))


def _counted(usage: CompletionUsage, more: int) -> CompletionUsage:
    """Return the usage with so many more tokens of the answer."""
    counts = CompletionUsage.of(usage.prompt_tokens, max(0, usage.completion_tokens + more))
    return evolve(usage, completion_tokens=counts.completion_tokens, total_tokens=counts.total_tokens)


def _split(whole: Any, size: int) -> tuple[Any, Any]:
    """Return its first tokens, with what came at its beginning, and the others, with what came at its end.

    Counts of tokens and the sum of log probabilities are, in each, those of all tokens up to its own.
    """
    first, rest = copy(whole), copy(whole)
    for name in _LISTS:
        if (known := getattr(whole, name)) is not None:
            setattr(first, name, known[:size])
            setattr(rest, name, known[size:])
    first.finish_reason = first.stop_reason = None
    if whole.cum_log_probs is not None:
        first.cum_log_probs = whole.cum_log_probs - sum(rest.log_probs) if rest.log_probs else None
    if (usage := whole.completion_usage) is not None:
        first.completion_usage = _counted(usage, -len(rest.token_ids))
    for name in _PARTS:
        if hasattr(rest, name):
            setattr(rest, name, None)
    return first, rest
