"""PolicyClass: how the requests of one kind wait. PolicyProfile: which kinds there are, and which a request is of.

Source: dynamo lib/kv-router/src/scheduling/policy_config.rs, PolicyProfile.

How much may wait: limits per class, and tiers by how much of a prompt is not cached.

Both are compared with what waits already, so the request that crosses a limit is still taken and the next is not.

Source: dynamo lib/kv-router/src/scheduling/policy_queue.rs, queue_rejection, and the queue depth tiers of its releases
before policy classes.

PolicyDocument: policy profiles from a parsed document: classes, families and buckets of prompts, per model.

    default_policy_family: chat
    uncached_isl_buckets: [{min_tokens: 0, bucket: short}, {min_tokens: 3072, bucket: long}]
    policy_classes:
      - {name: chat-short, policy_family: chat, cache_bucket: short, quantum: 4}
      - {name: chat-long, policy_family: chat, cache_bucket: long, quantum: 1, prefill_busy_threshold: 8192}
      - {name: batch, quantum: 1}
    models: {some-model: {...}}

Source: dynamo lib/kv-router/src/scheduling/policy_config.rs, RouterPolicyConfig. Other than there the document is given
as plain values, whatever file format it was read from, and custom worker selection is refused.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from attrs import define, field, fields, frozen

from pipeline import InvalidArgument
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.settings import is_finite

from ..config import KvRouterConfig, QueuePolicy
from ..errors import LimitKind, QueueRejected
from ..types import DEFAULT_CLASS, WorkerRank

UNKNOWN_BATCHED_TOKENS = 10_000_000
"""Stands for `max_num_batched_tokens` of a worker that does not publish it: no load reaches it."""


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
        """The tokens to compute for it, at least 1: no request is free."""
        return max(1, self.uncached_tokens)


@frozen
class PolicyClass:
    """One class of requests: their order, their share of the service, when they wait, and how many may.

    `quantum` is how many uncached tokens the class may have served each round. A rank is busy with more prompt tokens
    than one of the thresholds, absolute or as a multiple of its `max_num_batched_tokens`; without any no request waits.
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

    def busy_above(self, max_num_batched_tokens: int | None) -> float:
        """With more prompt tokens in flight than this a rank is busy; infinite without a threshold."""
        absolute, share = self.prefill_busy_threshold, self.prefill_busy_threshold_frac
        limit: float = math.inf if absolute is None else absolute
        if share is None:
            return limit
        batched = UNKNOWN_BATCHED_TOKENS if max_num_batched_tokens is None else max_num_batched_tokens
        return min(limit, share * batched)

    def all_busy(
        self, ranks: Sequence[WorkerRank], prefill_tokens: Iterable[int], configs: Mapping[int, ModelRuntimeConfig]
    ) -> bool:
        """Whether every rank is busy; False for none at all, since waiting would not bring one."""
        for rank, tokens in zip(ranks, prefill_tokens, strict=True):
            if tokens <= self.busy_above(configs[rank.worker_id].max_num_batched_tokens):
                return False
        return bool(ranks)

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
        """One class, by the plain settings of the router."""
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


@define
class QueueUsage:
    """What waits: requests, the tokens of their prompts, and how many of those are cached."""

    requests: int = 0
    isl_tokens: int = 0
    cached_tokens: int = 0

    def add(self, size: PromptSize, sign: int = 1) -> None:
        """Count a request, or with -1 remove it. No more than the prompt can be cached."""
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


_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PROFILE_KEYS = ("default_policy_family", "uncached_isl_buckets", "policy_classes")
_PLACE_KEYS = ("policy_family", "cache_bucket")
_CLASS_KEYS = tuple(a.name for a in fields(PolicyClass))


@frozen
class PolicyDocument:
    """A profile for all models, profiles for some, or both."""

    root: PolicyProfile | None
    models: Mapping[str, PolicyProfile]

    @classmethod
    def from_plain(cls, value: Any) -> PolicyDocument:
        """Raises InvalidArgument that names the first wrong place; unknown keys are wrong."""
        document = _mapping(value, "", (*_PROFILE_KEYS, "models", "worker_selection"))
        if document.get("worker_selection") is not None:
            raise InvalidArgument("custom worker selection is not offered", field="worker_selection")
        models = {} if document.get("models") is None else document["models"]
        if not isinstance(models, Mapping) or not all(isinstance(name, str) and name for name in models):
            raise InvalidArgument("must be an object with model names as keys", field="models")
        profiles = {name: _profile(profile, f"models.{name}.") for name, profile in models.items()}
        own = {key: document[key] for key in _PROFILE_KEYS if document.get(key) is not None}
        if not own and not profiles:
            raise InvalidArgument("must define a profile, for all models or for one", field="policy_classes")
        return cls(_profile(own, "") if own else None, profiles)

    def profile_for(self, model: str | None, otherwise: PolicyProfile) -> PolicyProfile:
        """The profile of a model: its own, else that for all, else `otherwise`. They are never merged."""
        return self.models.get(model or "") or self.root or otherwise


def _profile(value: Any, place: str) -> PolicyProfile:
    profile = _mapping(value, place, _PROFILE_KEYS)
    default = _name(profile.get("default_policy_family"), f"{place}default_policy_family")
    buckets = _buckets(profile.get("uncached_isl_buckets"), f"{place}uncached_isl_buckets")
    rows = _rows(profile.get("policy_classes"), f"{place}policy_classes")
    classes, matrix, explicit = [], dict[tuple[str, str], int](), dict[str, int]()
    for position, row in enumerate(rows):
        where = f"{place}policy_classes[{position}]"
        row = _mapping(row, f"{where}.", (*_CLASS_KEYS, *_PLACE_KEYS))
        classes.append(_policy_class(row, f"{where}."))
        if classes[-1].name in [earlier.name for earlier in classes[:-1]]:
            raise InvalidArgument("is the name of an earlier class too", field=f"{where}.name")
        cell = _cell(row, buckets, f"{where}.")
        if cell is None:
            explicit[classes[-1].name] = position
        elif matrix.setdefault(cell, position) != position:
            raise InvalidArgument(f"family {cell[0]} has a class for bucket {cell[1]} already", field=where)
    families = _families(matrix, list(buckets), f"{place}policy_classes")
    if default not in families:
        raise InvalidArgument("is not the family of any class", field=f"{place}default_policy_family")
    if clash := explicit.keys() & families.keys():
        raise InvalidArgument(f"{min(clash)} names both a class and a family", field=f"{place}policy_classes")
    return PolicyProfile(classes, default, families, list(buckets.values()), explicit)


def _families(matrix: Mapping[tuple[str, str], int], buckets: Sequence[str], place: str) -> dict[str, list[int]]:
    """For each family its classes in the order of the buckets."""
    families: dict[str, list[int]] = {}
    for family in dict.fromkeys(family for family, _ in matrix):
        missing = [bucket for bucket in buckets if (family, bucket) not in matrix]
        if missing:
            raise InvalidArgument(f"family {family} has no class for bucket {missing[0]}", field=place)
        families[family] = [matrix[family, bucket] for bucket in buckets]
    return families


def _buckets(value: Any, place: str) -> dict[str, int]:
    """Bucket -> its floor in uncached tokens, which begin with 0 and rise."""
    buckets: dict[str, int] = {}
    for position, row in enumerate(_rows(value, place)):
        where = f"{place}[{position}]"
        bucket = _mapping(row, f"{where}.", ("min_tokens", "bucket"))
        name = _name(bucket.get("bucket"), f"{where}.bucket")
        floor = _count(bucket.get("min_tokens"), 0, f"{where}.min_tokens")
        if name in buckets:
            raise InvalidArgument("is the name of an earlier bucket too", field=f"{where}.bucket")
        if not buckets and floor != 0:
            raise InvalidArgument("the first bucket begins at 0", field=f"{where}.min_tokens")
        if buckets and floor <= max(buckets.values()):
            raise InvalidArgument("must be above that of the bucket before", field=f"{where}.min_tokens")
        buckets[name] = floor
    return buckets


def _cell(row: Mapping[str, Any], buckets: Mapping[str, int], place: str) -> tuple[str, str] | None:
    """The family and bucket a class is for; None for one that requests name themselves."""
    given = [key for key in _PLACE_KEYS if row.get(key) is not None]
    if not given:
        return None
    if len(given) == 1:
        raise InvalidArgument("policy_family and cache_bucket go together", field=f"{place}{given[0]}")
    family, bucket = (_name(row[key], f"{place}{key}") for key in _PLACE_KEYS)
    if bucket not in buckets:
        raise InvalidArgument("is not one of the buckets", field=f"{place}cache_bucket")
    return family, bucket


def _policy_class(row: Mapping[str, Any], place: str) -> PolicyClass:
    policy = row.get("queue_policy", "fcfs")
    if policy not in ("fcfs", "wspt"):
        raise InvalidArgument(f"must be fcfs or wspt, got {policy!r}", field=f"{place}queue_policy")
    share = row.get("prefill_busy_threshold_frac")
    if share is not None and (type(share) not in (int, float) or not is_finite(share) or share < 0):
        raise InvalidArgument("must be a finite number not below 0", field=f"{place}prefill_busy_threshold_frac")
    counts = {
        key: None if row.get(key) is None else _count(row[key], 0, f"{place}{key}")
        for key in (
            *("prefill_busy_threshold", "request_queue_limit_per_worker"),
            *("raw_isl_token_queue_limit_per_worker", "cached_token_queue_limit_per_worker"),
        )
    }
    return PolicyClass(
        _name(row.get("name"), f"{place}name"),
        cast(QueuePolicy, policy),
        _count(row.get("quantum"), 1, f"{place}quantum"),
        prefill_busy_threshold_frac=share,
        **counts,
    )


def _mapping(value: Any, place: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgument("must be an object", field=place.removesuffix("."))
    for key in value:
        if key not in known:
            raise InvalidArgument(f"is not one of {', '.join(known)}", field=f"{place}{key}")
    return value


def _rows(value: Any, place: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise InvalidArgument("must be a list with at least one entry", field=place)
    return value


def _name(value: Any, place: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidArgument(f"must be of letters, digits, _, . and -, got {value!r}", field=place)
    return value


def _count(value: Any, low: int, place: str) -> int:
    if type(value) is not int or value < low:
        raise InvalidArgument(f"must be an integer not below {low}, got {value!r}", field=place)
    return value
