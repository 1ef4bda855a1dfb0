"""A worker's runtime configuration: defaults, environment, topology."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.errors import InvalidArgument
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.field_rules import InvalidRecord
from pipeline.wire import from_json, from_plain, to_json, to_plain


def test_an_empty_object_reads_to_all_defaults() -> None:
    config = from_json(b"{}", ModelRuntimeConfig)
    assert config == ModelRuntimeConfig()
    assert (config.data_parallel_size, config.enable_local_indexer, config.taints) == (1, True, set())


def test_what_a_default_configuration_writes() -> None:
    assert to_plain(ModelRuntimeConfig()) == {
        **dict.fromkeys(["total_kv_blocks", "max_num_seqs", "max_num_batched_tokens"]),
        **dict.fromkeys(["tool_call_parser", "reasoning_parser"]),
        "tool_call_arguments_format": "json_string",
        "structural_tag_mode": "off",
        "structural_tag_scope": "auto",
        "structural_tag_schema": "auto",
        "exclude_tools_when_tool_choice_none": True,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "enable_local_indexer": True,
        "enable_eagle": False,
    }


@pytest.mark.parametrize(
    ("own", "environment", "expected"),
    [
        (None, "worker-3", "worker-3"),
        (None, " worker-3 ", "worker-3"),
        ("mine", "worker-3", "mine"),
        (None, "   ", None),
        (None, None, None),
    ],
)
def test_the_stable_routing_id_comes_from_the_environment_only_if_unset(
    own: str | None, environment: str | None, expected: str | None
) -> None:
    config = ModelRuntimeConfig(stable_routing_id=own)
    config.fill_from_environment({} if environment is None else {"DYN_STABLE_ROUTING_ID": environment})
    assert config.stable_routing_id == expected


@pytest.mark.parametrize(("own", "effective"), [(None, "ns/c/e"), ("ns/kv/e", "ns/kv/e")])
def test_the_kv_state_endpoint_is_the_serving_one_unless_set(own: str | None, effective: str) -> None:
    config = ModelRuntimeConfig(kv_state_endpoint=own)
    assert config.effective_kv_state_endpoint("ns/c/e") == effective
    assert to_plain(config).get("kv_state_endpoint") == own


def test_topology_travels_and_its_taints_stand_next_to_the_callers() -> None:
    config = ModelRuntimeConfig(
        taints={"gpu", "dynamo.topology/zone=stale"},
        topology_domains={"zone": "a", "rack": "7"},
        kv_transfer_domain="zone",
        kv_transfer_enforcement="preferred",
        kv_transfer_preferred_weight=0.85,
    )
    assert config.taints == {"gpu", "dynamo.topology/zone=a", "dynamo.topology/rack=7"}
    assert from_json(to_json(config), ModelRuntimeConfig) == config


DOMAIN = {"topology_domains": {"zone": "a"}, "kv_transfer_domain": "zone"}


@pytest.mark.parametrize(
    ("plain", "place"),
    [
        ({**DOMAIN, "kv_transfer_enforcement": "fallback"}, "kv_transfer_enforcement"),
        ({"topology_domains": {"": "a"}}, "topology_domains"),
        ({"topology_domains": {"a=b": "a"}}, "topology_domains"),
        ({"topology_domains": {"zone": ""}}, "topology_domains"),
        ({"topology_domains": {"zone": " a"}}, "topology_domains"),
        ({"topology_domains": {"zone": "a=b"}}, "topology_domains"),
        ({"kv_transfer_domain": "zone"}, "kv_transfer_domain"),
        ({"kv_transfer_enforcement": "required"}, "kv_transfer_enforcement"),
        ({**DOMAIN, "kv_transfer_enforcement": "preferred"}, "kv_transfer_preferred_weight"),
        ({**DOMAIN, "kv_transfer_preferred_weight": 0.5}, "kv_transfer_preferred_weight"),
        (
            {**DOMAIN, "kv_transfer_enforcement": "required", "kv_transfer_preferred_weight": 0.5},
            "kv_transfer_preferred_weight",
        ),
        (
            {**DOMAIN, "kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 1.1},
            "kv_transfer_preferred_weight",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(plain: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain(plain, ModelRuntimeConfig)
    assert refused.value.field == place


@pytest.mark.parametrize("plain", [DOMAIN, {**DOMAIN, "kv_transfer_enforcement": "required"}])
def test_a_transfer_domain_needs_no_weight_of_its_own(plain: Any) -> None:
    assert from_plain(plain, ModelRuntimeConfig).kv_transfer_domain == "zone"


@pytest.mark.parametrize(
    ("plain", "environment", "backend"),
    [
        ({}, {}, "default"),
        ({}, {"DYN_TOKENIZER": "fastokens"}, "fastokens"),
        ({"tokenizer_backend": "basetenkenizer"}, {"DYN_TOKENIZER": "fastokens"}, "basetenkenizer"),
    ],
)
def test_an_explicit_tokenizer_beats_the_environment(plain: Any, environment: dict[str, str], backend: str) -> None:
    assert from_plain(plain, ModelRuntimeConfig).effective_tokenizer_backend(environment) == backend


@pytest.mark.parametrize(
    ("explicit", "environment", "fallback"),
    [
        (None, {}, True),
        (None, {"DYN_TOKENIZER_FALLBACK": "False"}, False),
        (True, {"DYN_TOKENIZER_FALLBACK": "false"}, True),
        (False, {}, False),
    ],
)
def test_an_explicit_fallback_beats_the_environment(
    explicit: bool | None, environment: dict[str, str], fallback: bool
) -> None:
    config = ModelRuntimeConfig(tokenizer_fallback_enabled=explicit)
    assert config.effective_tokenizer_fallback(environment) is fallback


def test_texts_of_the_environment_that_mean_nothing_are_errors() -> None:
    with pytest.raises(InvalidRecord):
        ModelRuntimeConfig().effective_tokenizer_backend({"DYN_TOKENIZER": "other"})
    with pytest.raises(InvalidRecord):
        ModelRuntimeConfig().effective_tokenizer_fallback({"DYN_TOKENIZER_FALLBACK": "maybe"})
