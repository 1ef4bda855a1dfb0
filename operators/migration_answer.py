"""The answer of a migrated request, made to look like that of one worker. Pure.

Source: dynamo lib/llm/src/migration.rs. Other than there, counts of the later workers are made counts of the whole
answer, and the error that is shown carries why no other worker could go on.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeAlias

from attrs import evolve, fields

from pipeline import Annotated, Cancelled
from pipeline.errors import chain
from pipeline.protocols import (
    BackendOutput,
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
)

Output: TypeAlias = LLMEngineOutput | BackendOutput
Item: TypeAlias = Annotated[Any]
"""An item of an engine, or of the detokenizer above it: its data is an Output."""


def behind(delivered_tokens: int, last: Output | None) -> Callable[[Item], Item]:
    """What makes an item of a later worker one of the whole answer; `last` is the last with tokens before it.

    To the worker the delivered tokens are prompt: its usage counts them there, and its cumulative log probability
    leaves them out. An item that has neither is returned as it is.
    """
    before = None if last is None else last.cum_log_probs
    usage_before = None if last is None else last.completion_usage
    spent = None if usage_before is None else usage_before.completion_tokens_details

    def whole(item: Item) -> Item:
        data = item.data
        if data is None or not delivered_tokens:
            return item
        usage, cum_log_probs = data.completion_usage, data.cum_log_probs
        if usage is None and (before is None or cum_log_probs is None):
            return item
        changed = copy(data)
        if usage is not None:
            changed.completion_usage = _moved(usage, delivered_tokens, spent)
        if before is not None and cum_log_probs is not None:
            changed.cum_log_probs = before + cum_log_probs
        return item.transfer(changed)

    return whole


def _moved(usage: CompletionUsage, delivered_tokens: int, spent: CompletionTokensDetails | None) -> CompletionUsage:
    """The usage with the delivered tokens counted as completion, not prompt; `spent` is what they were spent on."""
    prompt_tokens = max(0, usage.prompt_tokens - delivered_tokens)
    found = usage.prompt_tokens_details
    if found is not None and found.cached_tokens is not None:
        found = evolve(found, cached_tokens=min(found.cached_tokens, prompt_tokens))
    moved = CompletionUsage.of(prompt_tokens, usage.completion_tokens + delivered_tokens)
    return evolve(
        moved, prompt_tokens_details=found, completion_tokens_details=_sum(spent, usage.completion_tokens_details)
    )


def _sum(one: CompletionTokensDetails | None, other: CompletionTokensDetails | None) -> CompletionTokensDetails | None:
    """Both together; a count only one of them has is that one's."""
    if one is None or other is None:
        return one or other
    counts = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in fields(type(one))}
    known = {name: [count for count in pair if count is not None] for name, pair in counts.items()}
    return CompletionTokensDetails(**{name: sum(pair) if pair else None for name, pair in known.items()})


def ending(
    kind: type[Output] | None, finish_reason: FinishReason, last: Output | None, usage: CompletionUsage | None = None
) -> Item | None:
    """The last item of an answer that its worker did not end, behind `last`; None if no item has shown its kind."""
    if kind is None:
        return None
    made: Output = BackendOutput([], []) if kind is BackendOutput else LLMEngineOutput([])
    made.finish_reason, made.completion_usage = finish_reason, usage
    made.index = None if last is None else last.index
    return Annotated(made)


def error_shown(broke: Exception, ended: Exception) -> Exception:
    """The error of an answer that broke with the first, and could not be continued because of the second.

    A cancellation is shown as one. Else the first is shown, a copy of it with the second as the last of its causes.
    """
    if any(isinstance(link, Cancelled) for link in chain(ended)):
        return ended
    known = list(chain(broke))
    if any(link is one for link in chain(ended) for one in known):
        return broke
    shown: BaseException = ended
    try:
        for link in reversed(known):
            cause, shown = shown, copy(link)
            shown.__cause__ = cause
            shown.__traceback__ = link.__traceback__
    except Exception:  # an error of somebody else's that cannot be copied
        return broke
    return shown if isinstance(shown, Exception) else broke
