"""PolicyClass: how the requests of one kind wait. PolicyProfile: which kinds there are, and which a request is of.

Source: dynamo lib/kv-router/src/scheduling/policy_config.rs, PolicyProfile.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from pipeline import InvalidArgument
from pipeline.protocols.runtime_config import ModelRuntimeConfig

from .active_sequences_loads import Column
from .config import KvRouterConfig, QueuePolicy
from .worker_rank import WorkerRank

DEFAULT_CLASS = "default"
UNKNOWN_BATCHED_TOKENS = 10_000_000
"""Stands for `max_num_batched_tokens` where a worker does not say: no load comes near it."""


@frozen
class PromptSize:
    """The tokens of a waiting prompt, and how many of them the best worker for it has cached."""

    isl_tokens: int
    cached_tokens: int = 0

    @property
    def uncached_tokens(self) -> int:
        return max(0, self.isl_tokens - self.cached_tokens)

    @property
    def work_tokens(self) -> int:
        """What serving it takes, at least 1: nothing is free."""
        return max(1, self.uncached_tokens)


@frozen
class PolicyClass:
    """One class of requests: their order, their share of the service, when they wait, and how many may.

    `quantum` is how many uncached tokens the class may have served each round. A rank is busy with more prompt tokens
    than one of the thresholds, absolute or as a multiple of its `max_num_batched_tokens`; without any nobody waits.
    The limits are each multiplied by the number of workers. Raises InvalidArgument for a quantum below 1.
    """

    name: str = DEFAULT_CLASS
    queue_policy: QueuePolicy = "fcfs"
    quantum: int = 1
    prefill_busy_threshold: int | None = None
    prefill_busy_threshold_frac: float | None = None
    request_queue_limit_per_worker: int | None = None
    raw_isl_token_queue_limit_per_worker: int | None = None
    cached_token_queue_limit_per_worker: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.quantum < 1:  # its turn would never come
            raise InvalidArgument(f"must be at least 1, got {self.quantum}", field="quantum")

    @property
    def may_queue(self) -> bool:
        return self.prefill_busy_threshold is not None or self.prefill_busy_threshold_frac is not None

    def is_busy(self, prefill_tokens: int, max_num_batched_tokens: int | None) -> bool:
        """Whether a rank with so many prompt tokens in flight is busy."""
        return prefill_tokens > self.busy_above(max_num_batched_tokens)

    def busy_above(self, max_num_batched_tokens: int | None) -> float:
        """With more prompt tokens in flight than this a rank is busy; infinite without a threshold."""
        absolute, share = self.prefill_busy_threshold, self.prefill_busy_threshold_frac
        limit: float = math.inf if absolute is None else absolute
        if share is None:
            return limit
        batched = UNKNOWN_BATCHED_TOKENS if max_num_batched_tokens is None else max_num_batched_tokens
        return min(limit, share * batched)

    def all_busy(
        self, ranks: Iterable[WorkerRank], prefill_tokens: Column, configs: Mapping[int, ModelRuntimeConfig]
    ) -> bool:
        """Whether every rank is busy; False for none at all, since waiting would not bring one."""
        any_rank = False
        for rank, tokens in zip(ranks, prefill_tokens, strict=True):
            if not self.is_busy(tokens, configs[rank.worker_id].max_num_batched_tokens):
                return False
            any_rank = True
        return any_rank

    def score(self, size: PromptSize, arrival_s: float, priority_jump_s: float) -> float:
        """The place of a request among those of its strict priority: the higher, the earlier."""
        jump = max(0.0, priority_jump_s)
        if self.queue_policy == "fcfs":
            return jump - arrival_s
        if self.queue_policy == "lcfs":
            return jump + arrival_s
        return (1.0 + jump) / size.work_tokens


@frozen
class PolicyProfile:
    """The classes of a router, and the way from a request to its class.

    A request names a class of `explicit` and gets it, or a family; a name that is neither, or none, means the default
    family. Within a family the class depends on the uncached tokens: that of the highest floor not above them.
    `families` holds for each family the classes by floor; `floors` begins with 0.
    """

    classes: Sequence[PolicyClass]
    default_family: str
    families: Mapping[str, Sequence[int]]
    floors: Sequence[int] = (0,)
    explicit: Mapping[str, int] = field(factory=dict)

    @classmethod
    def single(cls, policy_class: PolicyClass) -> PolicyProfile:
        """One class for all."""
        return cls([policy_class], policy_class.name, {policy_class.name: [0]})

    @classmethod
    def from_config(cls, config: KvRouterConfig) -> PolicyProfile:
        """What the plain settings of the router say."""
        one = PolicyClass(
            queue_policy=config.router_queue_policy, prefill_busy_threshold_frac=config.router_queue_threshold
        )
        return cls.single(one)

    def class_of(self, requested: str | None, uncached_tokens: int) -> int:
        """The position of the request's class in `classes`."""
        name = requested or ""
        if name in self.explicit:
            return self.explicit[name]
        family = self.families.get(name, self.families[self.default_family])
        return family[bisect_right(self.floors, max(0, uncached_tokens)) - 1]
