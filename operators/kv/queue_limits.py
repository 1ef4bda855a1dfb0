"""How much may wait: limits per class, and tiers by how much of a prompt is not cached.

Both are compared with what waits already, so the request that crosses a limit is still taken and the next is not.

Source: dynamo lib/kv-router/src/scheduling/policy_queue.rs, queue_rejection, and the queue depth tiers of its releases
before policy classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import define, frozen

from pipeline import InvalidArgument

from .errors import LimitKind, QueueRejected
from .queue_classes import PolicyClass, PromptSize


@define
class QueueUsage:
    """What waits: requests, the tokens of their prompts, and how many of those are cached."""

    requests: int = 0
    isl_tokens: int = 0
    cached_tokens: int = 0

    def add(self, size: PromptSize, sign: int = 1) -> None:
        """Counts a request, or with -1 takes it off. No more can be cached than the prompt has."""
        self.requests += sign
        self.isl_tokens += sign * size.isl_tokens
        self.cached_tokens += sign * min(size.cached_tokens, size.isl_tokens)


@frozen
class DepthTier:
    """For prompts that miss at least so many tokens: how many prompt tokens may wait for each worker."""

    missing_cache_tokens_floor: int
    max_queue_depth: int


def check_tiers(tiers: Sequence[DepthTier]) -> None:
    """Raise InvalidArgument unless the floors begin with 0 and rise, and every depth is above 0."""
    floors = [tier.missing_cache_tokens_floor for tier in tiers]
    if floors and floors[0] != 0:
        raise InvalidArgument("the first tier begins at 0", field="missing_cache_tokens_floor")
    if any(low >= high for low, high in pairwise(floors)):
        raise InvalidArgument("must be above that of the tier before", field="missing_cache_tokens_floor")
    if any(tier.max_queue_depth < 1 for tier in tiers):
        raise InvalidArgument("must be above 0", field="max_queue_depth")


def check_class_limits(policy_class: PolicyClass, usage: QueueUsage, workers: int) -> None:
    """Raise QueueRejected if the class is full. A limit of 0, or no worker, lets nothing in."""
    rows: list[tuple[LimitKind, int, int | None]] = [
        ("requests", usage.requests, policy_class.request_queue_limit_per_worker),
        ("raw_isl_tokens", usage.isl_tokens, policy_class.raw_isl_token_queue_limit_per_worker),
        ("cached_tokens", usage.cached_tokens, policy_class.cached_token_queue_limit_per_worker),
    ]
    for kind, current, per_worker in rows:
        if per_worker is not None and current >= (limit := per_worker * workers):
            raise QueueRejected(policy_class=policy_class.name, limit_kind=kind, current=current, limit=limit)


def check_depth(tiers: Sequence[DepthTier], size: PromptSize, queued_isl_tokens: int, workers: int) -> None:
    """Raise QueueRejected if, by the highest tier this prompt reaches, enough waits already."""
    reached = [tier for tier in tiers if tier.missing_cache_tokens_floor <= size.uncached_tokens]
    if reached and queued_isl_tokens >= (limit := reached[-1].max_queue_depth * workers):
        raise QueueRejected(
            f"router backpressure: queued_isl_tokens={queued_isl_tokens}, max_queued_isl_tokens={limit}",
            limit_kind="raw_isl_tokens",
            current=queued_isl_tokens,
            limit=limit,
        )
