"""Policy profiles from a parsed document: classes, families and buckets of prompts, per model.

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

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from attrs import fields, frozen

from pipeline import InvalidArgument
from pipeline.settings import is_finite

from ..config import QueuePolicy
from .policy import PolicyClass, PolicyProfile

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
