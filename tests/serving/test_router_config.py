"""The settings of the KV router from a file and the environment, and the file of its policies."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from operators.kv import KvRouterConfig, PolicyProfile
from pipeline import InvalidArgument
from pipeline.protocols.limits import BusyThresholds
from serving.deployment import kv_router_config
from serving.deployment.kv_routing import policy_document, policy_profile
from serving.settings.graph_options import RoutingOptions


def written(folder: Path, text: str, name: str = "router.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path | None, environment: dict[str, str] | None = None) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as raised:
        kv_router_config(path, environment or {})
    return raised.value


# -- the settings


def test_without_file_and_environment_all_is_default() -> None:
    assert kv_router_config(None, {}) == KvRouterConfig()


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    environment = {"DYN_ROUTER_TEMPERATURE": "0.5"}
    assert kv_router_config(written(tmp_path, ""), environment) == KvRouterConfig(router_temperature=0.5)


def test_the_file_goes_before_the_environment_and_the_environment_before_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, 'router_temperature = 0.2\nrouter_queue_policy = "wspt"\n')
    environment = {"DYN_ROUTER_TEMPERATURE": "0.5", "DYN_ROUTER_QUEUE_THRESHOLD": "2.5"}
    expected = KvRouterConfig(router_temperature=0.2, router_queue_policy="wspt", router_queue_threshold=2.5)
    assert kv_router_config(path, environment) == expected


@pytest.mark.parametrize("option", [True, False])
def test_the_option_goes_before_both(tmp_path: Path, option: bool) -> None:
    path = written(tmp_path, f"use_kv_events = {str(not option).lower()}\n")
    assert kv_router_config(path, {"DYN_USE_KV_EVENTS": str(not option)}, option).use_kv_events is option
    assert kv_router_config(path, {"DYN_USE_KV_EVENTS": str(option)}).use_kv_events is not option


def test_the_file_also_goes_before_an_older_name_in_the_environment(tmp_path: Path) -> None:
    path = written(tmp_path, "overlap_score_credit = 0.5\nprefill_load_scale = 3.0\n")
    config = kv_router_config(path, {"DYN_OVERLAP_SCORE_WEIGHT": "0"})
    assert (config.overlap_score_credit, config.prefill_load_scale) == (0.5, 3.0)


def test_the_older_name_is_understood_in_the_file_too(tmp_path: Path) -> None:
    config = kv_router_config(written(tmp_path, "overlap_score_weight = 0\n"), {"DYN_ROUTER_PREFILL_LOAD_SCALE": "2"})
    assert (config.overlap_score_credit, config.prefill_load_scale) == (0.0, 0)


def test_everything_wrong_in_a_file_is_reported_at_once(tmp_path: Path) -> None:
    text = """
        router_temprature = 1.0
        router_temperature = -1.0
        use_kv_events = "yes"
        router_queue_policy = "lifo"
        router_ttl_secs = inf
        [queue]
        depth = 5
    """
    path = written(tmp_path, text)
    error = refused(path)
    assert str(error).startswith(f"{path}: ")
    for name in (
        *("router_temprature", "router_temperature", "use_kv_events"),
        *("router_queue_policy", "router_ttl_secs", "queue: is not a setting"),
    ):
        assert name in str(error)
    assert error.field == "router_temprature"


def test_the_placement_is_named_in_the_file_or_the_environment(tmp_path: Path) -> None:
    path = written(tmp_path, 'router_placement = "cost"\n')
    environment = {"DYN_ROUTER_PLACEMENT": "expected_delay"}
    assert kv_router_config(None, environment).router_placement == "expected_delay"
    assert kv_router_config(path, environment).router_placement == "cost"
    unknown = written(tmp_path, 'router_placement = "cheapest"\n', "unknown.toml")
    assert (refused(unknown).field, refused(None, {"DYN_ROUTER_PLACEMENT": "x"}).field) == ("router_placement",) * 2


def test_a_program_takes_its_own_placement_where_no_setting_names_one_and_none_weighs_the_cost(tmp_path: Path) -> None:
    def placed(text: str | None, environment: dict[str, str]) -> str:
        path = None if text is None else written(tmp_path, text)
        return kv_router_config(path, environment, placement="marginal_delay").router_placement

    assert placed(None, {}) == placed("router_temperature = 0.5", {}) == "marginal_delay"
    assert placed(None, {"DYN_ROUTER_PLACEMENT": " ", "DYN_ROUTER_PREFILL_LOAD_SCALE": "1"}) == "marginal_delay"
    assert placed('router_placement = "cost"', {}) == placed(None, {"DYN_ROUTER_PLACEMENT": "cost"}) == "cost"
    assert placed("overlap_score_weight = 2.0", {}) == placed("decode_active_request_weight = 1.0", {}) == "cost"
    assert placed(None, {"DYN_ROUTER_PREFILL_LOAD_SCALE": "2"}) == placed("prefill_load_scale = 0.5", {}) == "cost"
    table = {"router_placement": "expected_delay"}
    assert kv_router_config(table, {}, placement="marginal_delay").router_placement == "expected_delay"
    assert kv_router_config({}, {}, placement="marginal_delay").router_placement == "marginal_delay"


def test_the_options_of_programs_place_by_marginal_delay() -> None:
    by_cost = RoutingOptions(router_config={"router_placement": "cost"})
    for options, expected in ((RoutingOptions(), "marginal_delay"), (by_cost, "cost")):
        assert options.graph_fields("kv", BusyThresholds(), {})["kv_router"].router_placement == expected


@pytest.mark.parametrize(
    ("varied", "expected"),
    [
        ("overlap_score_credit", "marginal_delay"),
        ("prefill_load_scale", "cost"),
        ("decode_active_request_weight", "cost"),
    ],
)
def test_a_sweep_of_what_only_the_cost_reads_places_by_cost(varied: str, expected: str) -> None:
    fields = RoutingOptions().graph_fields("kv", BusyThresholds(), {}, varied={varied})
    assert fields["kv_router"].router_placement == expected


def test_settings_that_contradict_each_other_are_refused_wherever_they_are_from(tmp_path: Path) -> None:
    path = written(tmp_path, "router_track_output_blocks = true\n")
    error = refused(path, {"DYN_ROUTER_TRACK_ACTIVE_BLOCKS": "false"})
    assert error.field == "router_track_output_blocks"
    with pytest.raises(InvalidArgument) as raised:
        kv_router_config(None, {"DYN_ROUTER_PREDICTED_TTL_SECS": "5"}, use_kv_events=False)
    assert raised.value.field == "router_predicted_ttl_secs"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"router_temperature = ?\n", "no TOML: .*line 1"),
        (b"a = 1\na = 2\n", "no TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a = " + b"1" * 5000, "no TOML"),
        (b"a = " + b"[" * 2000, "no TOML"),
    ],
)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "router.toml"
    path.write_bytes(content)
    error = refused(path)
    assert re.search(what, str(error))
    assert (str(path) in str(error), error.field) == (True, "router_config")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path, what in (
        (tmp_path / "missing.toml", "No such file"),
        (tmp_path, "cannot be read"),
        (Path("router\0.toml"), "no path"),
    ):
        error = refused(path)
        assert what in str(error)
        assert error.field == "router_config"


# -- the policies

POLICIES = """
default_policy_family: chat
uncached_isl_buckets:
  - {min_tokens: 0, bucket: cached}
  - {min_tokens: 3072, bucket: uncached}
policy_classes:
  - {name: chat-cached, policy_family: chat, cache_bucket: cached, quantum: 4, prefill_busy_threshold: 8192}
  - {name: chat-uncached, policy_family: chat, cache_bucket: uncached, quantum: 1, queue_policy: wspt}
  - {name: batch, quantum: 1, request_queue_limit_per_worker: 8}
models:
  small:
    default_policy_family: only
    uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
    policy_classes: [{name: only-class, policy_family: only, cache_bucket: all, quantum: 2}]
"""


def named(profile: PolicyProfile, requested: str | None, uncached_tokens: int) -> str:
    return profile.classes[profile.class_of(requested, uncached_tokens)].name


def test_a_policy_file_assigns_requests_to_classes(tmp_path: Path) -> None:
    profile = policy_profile(written(tmp_path, POLICIES, "policy.yaml"), "some-model")
    assert named(profile, None, 3071) == "chat-cached"
    assert named(profile, None, 3072) == "chat-uncached"
    assert named(profile, "unheard-of", 5000) == "chat-uncached"
    assert [named(profile, "batch", tokens) for tokens in (0, 5000)] == ["batch", "batch"]
    assert profile.classes[0].prefill_busy_threshold == 8192


def test_a_models_own_profile_replaces_that_for_all(tmp_path: Path) -> None:
    path = str(written(tmp_path, POLICIES, "policy.yaml"))
    assert named(policy_profile(path, "small"), "batch", 5000) == "only-class"
    only = POLICIES[POLICIES.index("models:") :]
    path = str(written(tmp_path, only, "policy.yml"))
    config = KvRouterConfig(router_queue_threshold=2.0, router_queue_policy="wspt")
    assert policy_profile(path, "other", config) == PolicyProfile.from_config(config)
    assert policy_profile(path, None) == PolicyProfile.from_config(KvRouterConfig())


def test_a_policy_file_may_be_toml(tmp_path: Path) -> None:
    text = """
        default_policy_family = "all"
        uncached_isl_buckets = [{ min_tokens = 0, bucket = "any" }]
        [[policy_classes]]
        name = "everybody"
        policy_family = "all"
        cache_bucket = "any"
        quantum = 1
    """
    document = policy_document(written(tmp_path, text, "policy.TOML"))
    assert document.root is not None
    assert named(document.root, None, 7) == "everybody"


@pytest.mark.parametrize(
    ("wrong", "right", "place"),
    [
        ("queue_policy: lcfs", "queue_policy: wspt", "policy_classes[1].queue_policy"),
        ("quantum: 0", "quantum: 4", "policy_classes[0].quantum"),
        ("cache_bucket: cached, quantum: 1", "cache_bucket: uncached, quantum: 1", "policy_classes[1]"),
        ("policy_family: other, cache_bucket: uncached", "policy_family: chat, cache_bucket: uncached", "no class for"),
        ("min_tokens: 1,", "min_tokens: 0,", "uncached_isl_buckets[0].min_tokens"),
        ("min_tokens: 0,", "min_tokens: 3072,", "uncached_isl_buckets[1].min_tokens"),
        ("name: batch, policy_family: chat", "name: batch", "policy_classes[2].policy_family"),
        ("name: 'b a'", "name: batch", "policy_classes[2].name"),
        ("quanta: 1", "quantum: 1", "policy_classes[1].quanta"),
    ],
)
def test_an_impossible_policy_file_is_refused(tmp_path: Path, wrong: str, right: str, place: str) -> None:
    assert right in POLICIES
    path = written(tmp_path, POLICIES.replace(right, wrong, 1), "policy.yaml")
    with pytest.raises(InvalidArgument) as raised:
        policy_profile(path, None)
    assert str(raised.value).startswith(f"{path}: ")
    assert place in str(raised.value)
    assert raised.value.field == "router_policy_config"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "must be an object"),
        ("- 1", "must be an object"),
        ("models: {}", "must define a profile"),
        ("a: [1", "no YAML: .*line 1"),
        ("a: 1\n---\nb: 2\n", "no YAML"),
        ("a: !!python/object/apply:os.getcwd []", "no YAML: .*constructor"),
        ("a: 2020-13-45", "no YAML: month"),
        ("[" * 2000, "no YAML"),
        ("a: \0", "no YAML"),
        ("models:\n  m: &m {models: *m}\n", "is not one of"),
        (POLICIES.replace("quantum: 4", "quantum: 4, quantum: 5"), "no YAML: quantum comes twice, line 7"),
        (POLICIES + "  small: {}\n", "small comes twice"),
    ],
)
def test_a_policy_file_that_is_malformed_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = written(tmp_path, text, "policy.yaml")
    with pytest.raises(InvalidArgument, match=what) as raised:
        policy_document(path)
    assert (str(path) in str(raised.value), raised.value.field) == (True, "router_policy_config")
    assert "\n" not in str(raised.value)


def test_a_policy_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"missing\.yaml: cannot be read: No such file") as raised:
        policy_profile(tmp_path / "missing.yaml", None)
    assert raised.value.field == "router_policy_config"


def test_without_pyyaml_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(InvalidArgument, match=r"penstock\[serve\]"):
        policy_document(written(tmp_path, POLICIES, "policy.yaml"))


def test_the_same_block_may_be_named_twice_in_a_policy_file(tmp_path: Path) -> None:
    anchored = POLICIES.replace("models:\n  small:", "models:\n  small: &small").rstrip() + "\n  tiny: *small\n"
    document = policy_document(written(tmp_path, anchored, "policy.yaml"))
    assert document.models["tiny"] == document.models["small"]
