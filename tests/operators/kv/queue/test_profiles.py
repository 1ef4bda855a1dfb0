"""Policy documents: what they set, and what is wrong with some."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from operators.kv.queue import PolicyClass, PolicyDocument, PolicyProfile
from pipeline import InvalidArgument

DOCUMENT: dict[str, Any] = {
    "default_policy_family": "chat",
    "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "cached"}, {"min_tokens": 3072, "bucket": "uncached"}],
    "policy_classes": [
        {"name": "chat-cached", "policy_family": "chat", "cache_bucket": "cached", "quantum": 4},
        {
            "name": "chat-uncached",
            "policy_family": "chat",
            "cache_bucket": "uncached",
            "quantum": 1,
            "queue_policy": "wspt",
            "prefill_busy_threshold": 8192,
            "prefill_busy_threshold_frac": 0.5,
            "request_queue_limit_per_worker": 3,
            "raw_isl_token_queue_limit_per_worker": 4,
            "cached_token_queue_limit_per_worker": 5,
        },
        {"name": "agents-cached", "policy_family": "agents", "cache_bucket": "cached", "quantum": 1},
        {"name": "agents-uncached", "policy_family": "agents", "cache_bucket": "uncached", "quantum": 1},
        {"name": "batch", "quantum": 1},
    ],
}
OTHERWISE = PolicyProfile.single(PolicyClass("otherwise"))


def profile() -> PolicyProfile:
    return PolicyDocument.from_plain(DOCUMENT).profile_for(None, OTHERWISE)


def class_name(requested: str | None, uncached_tokens: int) -> str:
    one = profile()
    return one.classes[one.class_of(requested, uncached_tokens)].name


def test_the_bucket_is_the_highest_floor_reached() -> None:
    assert [class_name("chat", tokens) for tokens in (0, 3071, 3072, 10**9)] == [
        *("chat-cached", "chat-cached"),
        *("chat-uncached", "chat-uncached"),
    ]


@pytest.mark.parametrize("requested", [None, "", "nobody-knows", "chat-uncached"])
def test_a_name_that_is_neither_class_nor_family_means_the_default_family(requested: str | None) -> None:
    """A class of a family cannot be requested by its name."""
    assert class_name(requested, 0) == "chat-cached"


def test_a_family_is_requested_by_name_and_an_explicit_class_bypasses_the_buckets() -> None:
    assert class_name("agents", 5000) == "agents-uncached"
    assert [class_name("batch", tokens) for tokens in (0, 5000)] == ["batch", "batch"]


def test_a_class_has_the_values_of_its_row() -> None:
    assert profile().classes[1] == PolicyClass("chat-uncached", "wspt", 1, 8192, 0.5, 3, 4, 5)
    assert profile().classes[4] == PolicyClass("batch")


def test_the_profile_of_a_model_replaces_that_for_all() -> None:
    own = {
        "default_policy_family": "f",
        "uncached_isl_buckets": [{"min_tokens": 0, "bucket": "all"}],
        "policy_classes": [{"name": "only", "policy_family": "f", "cache_bucket": "all", "quantum": 2}],
    }
    both = PolicyDocument.from_plain({**DOCUMENT, "models": {"m": own}})
    assert [one.name for one in both.profile_for("m", OTHERWISE).classes] == ["only"]
    assert len(both.profile_for("other", OTHERWISE).classes) == 5
    alone = PolicyDocument.from_plain({"models": {"m": own}})
    assert alone.profile_for("other", OTHERWISE) is OTHERWISE


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with another value at a place; None takes the place away."""
    document = deepcopy(DOCUMENT)
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = document
    for part in above:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ([], ""),
        ({}, "policy_classes"),
        ({"models": {}}, "policy_classes"),
        ({"models": {"": {}}}, "models"),
        ({**DOCUMENT, "models": []}, "models"),
        ({**DOCUMENT, "worker_selection": {"prefill": "x"}}, "worker_selection"),
        (changed("surprise", 1), "surprise"),
        (changed("default_policy_family", None), "default_policy_family"),
        (changed("default_policy_family", "other"), "default_policy_family"),
        (changed("uncached_isl_buckets", []), "uncached_isl_buckets"),
        (changed("uncached_isl_buckets.0.min_tokens", 1), "uncached_isl_buckets[0].min_tokens"),
        (changed("uncached_isl_buckets.1.min_tokens", 0), "uncached_isl_buckets[1].min_tokens"),
        (changed("uncached_isl_buckets.1.bucket", "cached"), "uncached_isl_buckets[1].bucket"),
        (changed("policy_classes", []), "policy_classes"),
        (changed("policy_classes.3", None), "policy_classes"),
        (changed("policy_classes.3.cache_bucket", "cached"), "policy_classes[3]"),
        (changed("policy_classes.3.cache_bucket", "deep"), "policy_classes[3].cache_bucket"),
        (changed("policy_classes.3.cache_bucket", None), "policy_classes[3].policy_family"),
        (changed("policy_classes.3.name", "batch"), "policy_classes[4].name"),
        (changed("policy_classes.4.name", "a b"), "policy_classes[4].name"),
        (changed("policy_classes.4.name", "agents"), "policy_classes"),
        (changed("policy_classes.4.quantum", None), "policy_classes[4].quantum"),
        (changed("policy_classes.4.quantum", 0), "policy_classes[4].quantum"),
        (changed("policy_classes.4.queue_policy", "lcfs"), "policy_classes[4].queue_policy"),
        (changed("policy_classes.4.prefill_busy_threshold", -1), "policy_classes[4].prefill_busy_threshold"),
        (
            changed("policy_classes.4.prefill_busy_threshold_frac", float("nan")),
            "policy_classes[4].prefill_busy_threshold_frac",
        ),
        (
            changed("policy_classes.4.prefill_busy_threshold_frac", 10**400),
            "policy_classes[4].prefill_busy_threshold_frac",
        ),
        (changed("policy_classes.4.limit", 1), "policy_classes[4].limit"),
        ({"models": {"m": changed("policy_classes.4.quantum", 0)}}, "models.m.policy_classes[4].quantum"),
    ],
)
def test_a_wrong_document_is_refused_at_its_place(document: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        PolicyDocument.from_plain(document)
    assert refused.value.field == field
