"""KvRouterConfig: defaults, every check, the environment, and what a request may override."""

from __future__ import annotations

import math
from typing import Any

import pytest
from attrs import asdict, fields

from operators.kv import (
    ACTIVE_REQUEST_EXPIRY,
    OVERLAP_REFRESH_AFTER,
    KvRouterConfig,
    config_from_environment,
)
from pipeline import InvalidArgument
from pipeline.protocols import RouterConfigOverride
from pipeline.settings import settings_of

DEFAULTS = {
    "overlap_score_credit": 1.0,
    "overlap_score_credit_decay": 0.0,
    "prefill_load_scale": 1.0,
    "decode_active_request_weight": 0.0,
    "host_cache_hit_weight": 0.75,
    "disk_cache_hit_weight": 0.25,
    "router_placement": "cost",
    "router_temperature": 0.0,
    "use_kv_events": True,
    "router_replica_sync": False,
    "router_track_active_blocks": True,
    "router_track_output_blocks": False,
    "router_assume_kv_reuse": True,
    "router_track_prefill_tokens": True,
    "router_tracking_hash": "public-xxh3-v1",
    "router_tracking_hash_key_file": None,
    "router_tracking_hash_key_id": None,
    "router_prefill_load_model": "none",
    "router_ttl_secs": 120.0,
    "router_max_tree_size": 1_048_576,
    "router_prune_target_ratio": 0.8,
    "router_queue_threshold": 4.0,
    "router_queue_policy": "fcfs",
    "router_policy_config": None,
    "router_prefill_policy": None,
    "router_decode_policy": None,
    "router_event_threads": 4,
    "skip_initial_worker_wait": False,
    "min_initial_workers": 1,
    "use_remote_indexer": False,
    "serve_indexer": False,
    "shared_cache_multiplier": 0.0,
    "shared_cache_type": "none",
    "router_predicted_ttl_secs": None,
    "conditional_disagg_enabled": False,
    "conditional_disagg_policy": "isl_bounding",
    "conditional_disagg_eff_isl_threshold": 2048,
    "conditional_disagg_eff_isl_ratio_threshold": 0.7,
    "conditional_disagg_prefill_busy_threshold": None,
    "conditional_disagg_decode_busy_threshold": None,
    "durable_kv_events": False,
    "router_snapshot_threshold": 1_000_000,
    "router_reset_states": False,
}


def refused(**values: Any) -> str:
    """The field that is blamed for these settings."""
    with pytest.raises(InvalidArgument) as error:
        KvRouterConfig.from_plain(values)
    return error.value.field


def test_the_defaults_are_those_of_the_table() -> None:
    assert asdict(KvRouterConfig()) == DEFAULTS


@pytest.mark.parametrize(
    "wrong",
    [
        *({"overlap_score_credit": value} for value in (-0.1, math.nan, math.inf)),
        *({"shared_cache_multiplier": value} for value in (-0.1, 1.1)),
        *({name: -1.0} for name in ("overlap_score_credit_decay", "prefill_load_scale", "router_temperature")),
        *({name: math.inf} for name in ("decode_active_request_weight", "router_ttl_secs", "router_queue_threshold")),
        *({name: 1.01} for name in ("host_cache_hit_weight", "disk_cache_hit_weight", "router_prune_target_ratio")),
        {"conditional_disagg_eff_isl_ratio_threshold": 2.0},
        {"router_event_threads": 0},
        {"router_max_tree_size": 0},
        {"min_initial_workers": -1},
        {"router_predicted_ttl_secs": -1.0},
        *({name: 10**400} for name in ("router_temperature", "router_max_tree_size")),
        *({"overlap_score_weight": value} for value in (-1, math.nan, "2", True)),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    assert refused(**wrong) == next(iter(wrong))


def test_more_credit_than_one_is_allowed() -> None:
    assert KvRouterConfig(overlap_score_credit=1.5).overlap_score_credit == 1.5


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"router_predicted_ttl_secs": 5.0, "use_kv_events": False}, "router_predicted_ttl_secs"),
        (
            {"router_track_output_blocks": True, "router_track_active_blocks": False},
            "router_track_output_blocks",
        ),
        (
            {"router_prefill_load_model": "aic", "router_track_prefill_tokens": False},
            "router_prefill_load_model",
        ),
        ({"use_remote_indexer": True, "serve_indexer": True}, "serve_indexer"),
        ({"serve_indexer": True, "overlap_score_credit": 0}, "serve_indexer"),
        (
            {
                "conditional_disagg_enabled": True,
                "conditional_disagg_policy": "prefill_load",
                "router_queue_threshold": None,
            },
            "conditional_disagg_policy",
        ),
        ({"router_tracking_hash": "keyed-xxh3-v1"}, "router_tracking_hash"),
        ({"router_tracking_hash_key_id": "k"}, "router_tracking_hash"),
        ({"durable_kv_events": True}, "durable_kv_events"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any], field: str) -> None:
    assert refused(**wrong) == field


def test_either_threshold_serves_a_load_based_policy() -> None:
    config = KvRouterConfig(conditional_disagg_enabled=True, conditional_disagg_policy="isl_or_load")
    assert config.conditional_prefill_busy_threshold == 4.0
    own = KvRouterConfig(
        conditional_disagg_enabled=True,
        conditional_disagg_policy="isl_or_load",
        conditional_disagg_prefill_busy_threshold=2.0,
        router_queue_threshold=None,
    )
    assert own.conditional_prefill_busy_threshold == 2.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"router_event_threads": 4.0},
        {"router_event_threads": True},
        {"router_temperature": "0"},
        {"router_temperature": None},
        {"use_kv_events": 1},
        {"router_queue_policy": "lifo"},
        {"router_policy_config": 3},
        {"no_such_setting": 1},
    ],
)
def test_a_value_of_another_kind_and_an_unknown_key_are_refused(wrong: dict[str, Any]) -> None:
    assert refused(**wrong) == next(iter(wrong))


@pytest.mark.parametrize("values", [None, [], "router_temperature: 1", 3])
def test_settings_that_are_no_object_are_refused(values: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be an object"):
        KvRouterConfig.from_plain(values)


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "YES", "on", " on "])
@pytest.mark.parametrize("opposite", [False, True])
def test_booleans_are_written_in_four_ways_and_any_case(text: str, opposite: bool) -> None:
    opposites = {"true": "false", "1": "0", "yes": "no", "on": "off"}
    written = opposites[text.strip().lower()] if opposite else text
    config = config_from_environment({"DYN_ROUTER_REPLICA_SYNC": written, "DYN_USE_KV_EVENTS": written})
    assert (config.router_replica_sync, config.use_kv_events) == (not opposite, not opposite)


def test_every_problem_is_reported_at_once() -> None:
    wrong = {"typo": 1, "use_kv_events": "x", "router_event_threads": 0, "serve_indexer": True}
    with pytest.raises(InvalidArgument) as error:
        KvRouterConfig.from_plain({**wrong, "use_remote_indexer": True})
    for name in ("typo", "use_kv_events", "router_event_threads", "serve_indexer"):
        assert f"{name}: " in error.value.message


def test_an_integer_is_a_number_and_none_keeps_what_allows_none() -> None:
    config = KvRouterConfig.from_plain({"router_temperature": 1, "router_queue_threshold": None})
    assert (config.router_temperature, config.router_queue_threshold) == (1, None)


def test_the_older_weight_sets_the_scale_and_zero_takes_the_credit() -> None:
    both = {"overlap_score_weight": 2.5, "prefill_load_scale": 7.0, "overlap_score_credit": 0.5}
    config = KvRouterConfig.from_plain(both)
    assert (config.prefill_load_scale, config.overlap_score_credit, config.has_index) == (2.5, 0.5, True)
    off = KvRouterConfig.from_plain({"overlap_score_weight": 0})
    assert (off.prefill_load_scale, off.overlap_score_credit, off.has_index) == (0, 0, False)


def test_waiting_for_workers_can_be_skipped() -> None:
    assert KvRouterConfig().initial_workers == 1
    assert KvRouterConfig(min_initial_workers=3, skip_initial_worker_wait=True).initial_workers == 0


def test_an_override_changes_what_it_names_and_nothing_else() -> None:
    config = KvRouterConfig(host_cache_hit_weight=0.5, decode_active_request_weight=3.0, router_temperature=0.5)
    plain = config.settings()
    assert config.settings(RouterConfigOverride()) == plain
    changed = config.settings(
        RouterConfigOverride(
            overlap_score_credit=0.0,
            prefill_load_scale=2.0,
            router_temperature=0.0,
            assume_kv_reuse=False,
            track_prefill_tokens=False,
            shared_cache_multiplier=0.25,
        )
    )
    differing = {a.name for a in fields(type(plain)) if getattr(plain, a.name) != getattr(changed, a.name)}
    assert differing == {
        *("overlap_score_credit", "prefill_load_scale", "temperature", "assume_kv_reuse"),
        *("track_prefill_tokens", "shared_cache_multiplier"),
    }
    assert (plain.host_cache_hit_weight, plain.decode_active_request_weight) == (0.5, 3.0)


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", "0.5", "overlap_score_credit", 0.5),
        ("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY", "2", "overlap_score_credit_decay", 2.0),
        ("DYN_ROUTER_PREFILL_LOAD_SCALE", "3", "prefill_load_scale", 3.0),
        ("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", "4", "decode_active_request_weight", 4.0),
        ("DYN_ROUTER_PLACEMENT", "expected_delay", "router_placement", "expected_delay"),
        ("DYN_ROUTER_TEMPERATURE", "0.25", "router_temperature", 0.25),
        ("DYN_USE_KV_EVENTS", "off", "use_kv_events", False),
        ("DYN_ROUTER_REPLICA_SYNC", "yes", "router_replica_sync", True),
        ("DYN_ROUTER_TRACK_ACTIVE_BLOCKS", "0", "router_track_active_blocks", False),
        ("DYN_ROUTER_TRACK_OUTPUT_BLOCKS", "TRUE", "router_track_output_blocks", True),
        ("DYN_ROUTER_ASSUME_KV_REUSE", "no", "router_assume_kv_reuse", False),
        ("DYN_ROUTER_TRACK_PREFILL_TOKENS", "false", "router_track_prefill_tokens", False),
        ("DYN_ROUTER_QUEUE_THRESHOLD", "2.5", "router_queue_threshold", 2.5),
        ("DYN_ROUTER_POLICY_CONFIG", "/a/b.yaml", "router_policy_config", "/a/b.yaml"),
        ("DYN_ROUTER_PREFILL_POLICY", "p", "router_prefill_policy", "p"),
        ("DYN_ROUTER_DECODE_POLICY", "d", "router_decode_policy", "d"),
        ("DYN_ROUTER_PREDICTED_TTL_SECS", "9", "router_predicted_ttl_secs", 9.0),
        ("DYN_ROUTER_MIN_INITIAL_WORKERS", "2", "min_initial_workers", 2),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_POLICY", "isl_or_load", "conditional_disagg_policy", "isl_or_load"),
    ],
)
def test_a_variable_sets_its_field(variable: str, text: str, field: str, value: object) -> None:
    assert settings_of(KvRouterConfig)[field].variable == variable
    assert getattr(config_from_environment({variable: text}), field) == value


@pytest.mark.parametrize(
    "unreadable",
    [
        {"DYN_ROUTER_TEMPERATURE": "warm"},
        {"DYN_USE_KV_EVENTS": "perhaps"},
        {"DYN_ROUTER_MIN_INITIAL_WORKERS": "-1"},
        {"DYN_ROUTER_CONDITIONAL_DISAGG_POLICY": "other"},
        {"DYN_ROUTER_TEMPERATURE": ""},
        {"DYN_ROUTER_TEMPERATURE": "1_0"},
        {"DYN_ROUTER_TEMPERATURE": "٣"},
        {"DYN_ROUTER_MIN_INITIAL_WORKERS": "2.0"},
        {"DYN_ROUTER_MIN_INITIAL_WORKERS": str(2**64)},
        {},
    ],
)
def test_a_text_that_cannot_be_read_counts_as_not_set(unreadable: dict[str, str]) -> None:
    assert config_from_environment(unreadable) == KvRouterConfig()


@pytest.mark.parametrize(
    ("variable", "text"),
    [("DYN_ROUTER_TEMPERATURE", "-1"), ("DYN_ROUTER_TEMPERATURE", "nan"), ("DYN_ROUTER_TRACKING_HASH", "md5")],
)
def test_what_can_be_read_and_is_wrong_is_refused(variable: str, text: str) -> None:
    with pytest.raises(InvalidArgument):
        config_from_environment({variable: text})


def test_the_environment_wins_over_a_file() -> None:
    values = {"router_temperature": 0.5, "router_event_threads": 2}
    config = config_from_environment({"DYN_ROUTER_TEMPERATURE": "0.75"}, values)
    assert (config.router_temperature, config.router_event_threads) == (0.75, 2)


def test_of_two_older_weights_the_newer_name_wins() -> None:
    both = {"DYN_OVERLAP_SCORE_WEIGHT": "1.5", "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "2.5"}
    assert config_from_environment(both).prefill_load_scale == 2.5
    assert config_from_environment({"DYN_OVERLAP_SCORE_WEIGHT": "1.5"}).prefill_load_scale == 1.5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3600", 3600.0), ("9" * 5000, 300.0), ("", 300.0), ("abc", 300.0), ("0", 300.0), (None, 300.0)],
)
def test_requests_expire_after_the_time_set_if_there_is_one(text: str | None, seconds: float) -> None:
    environment = {} if text is None else {"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": text}
    assert ACTIVE_REQUEST_EXPIRY.of(environment) == seconds


@pytest.mark.parametrize(("text", "seconds"), [("2.5", 2.5), ("0", 0.0), ("", 10.0), ("-1", 10.0), ("inf", 10.0)])
def test_waiting_requests_are_looked_up_again_after_the_time_set(text: str, seconds: float) -> None:
    assert OVERLAP_REFRESH_AFTER.of({"DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS": text}) == seconds


def test_a_placement_rule_has_a_known_name_wherever_it_is_set() -> None:
    with pytest.raises(
        InvalidArgument, match="must be one of cost, expected_delay, marginal_delay, got 'cheapest'"
    ) as raised:
        KvRouterConfig.from_plain({"router_placement": "cheapest"})
    assert raised.value.field == "router_placement"
    with pytest.raises(InvalidArgument, match="cheapest") as raised:
        config_from_environment({"DYN_ROUTER_PLACEMENT": "cheapest"})
    assert raised.value.field == "router_placement"


def test_the_placement_of_the_router_holds_for_each_of_its_requests() -> None:
    config = KvRouterConfig(router_placement="expected_delay")
    changed = config.settings(RouterConfigOverride(overlap_score_credit=0.0))
    assert (config.settings().placement, changed.placement) == ("expected_delay", "expected_delay")
    assert KvRouterConfig().settings().placement == "cost"
