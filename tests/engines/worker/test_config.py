"""A worker's settings, its times, and the model data it publishes."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from engines import DisaggregationMode, EngineConfig, ShutdownTimes, WorkerConfig
from engines.worker.config import parse_endpoint_types, served_name
from pipeline import InvalidArgument
from pipeline.protocols.card import ModelType

MODES = DisaggregationMode


def test_the_defaults_are_those_of_the_documents() -> None:
    config = WorkerConfig()
    assert (config.namespace, config.component, config.endpoint) == ("dynamo", "backend", "generate")
    assert (config.model_name, config.served_model_name, config.model_input) == ("", None, "Tokens")
    assert config.endpoint_types == "chat,completions"
    assert config.enable_local_indexer
    assert config.enable_kv_routing
    assert config.exclude_tools_when_tool_choice_none
    assert not config.route_to_encoder
    assert (config.disaggregation_mode, list(config.metrics_labels)) == (MODES.AGGREGATED, [])
    assert config.health_check_payload is None
    assert config.checked() is config


@pytest.mark.parametrize(
    ("mode", "component"), [*((mode, "backend") for mode in MODES if mode != "prefill"), (MODES.PREFILL, "prefill")]
)
def test_the_component_follows_the_mode_unless_it_is_given(mode: DisaggregationMode, component: str) -> None:
    assert WorkerConfig(disaggregation_mode=mode).component == component
    assert WorkerConfig(disaggregation_mode=mode, component="mine").component == "mine"


# -- from a program's own settings


class Foreign(Enum):
    """Modes of another library: only the names agree."""

    AGGREGATED = 1
    PREFILL = "p"
    Decode = object()
    BOTH = 4


def test_an_object_without_settings_gives_the_defaults() -> None:
    assert WorkerConfig.from_runtime_config(object()) == WorkerConfig()
    empty = SimpleNamespace(disaggregation_mode=None, serving_mode=None, namespace=None, component="")
    assert WorkerConfig.from_runtime_config(empty) == WorkerConfig()


def test_settings_are_taken_by_their_names_and_overrides_win() -> None:
    given = SimpleNamespace(
        namespace="ns", endpoint="ep", dyn_tool_call_parser="hermes", custom_jinja_template="t.jinja", unknown=1
    )
    config = WorkerConfig.from_runtime_config(given, endpoint="other", served_model_name="m")
    assert (config.namespace, config.endpoint, config.served_model_name) == ("ns", "other", "m")
    assert (config.tool_call_parser, config.custom_jinja_template) == ("hermes", Path("t.jinja"))


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"serving_mode": Foreign.PREFILL}, MODES.PREFILL),
        ({"disaggregation_mode": None, "serving_mode": Foreign.Decode}, MODES.DECODE),
        ({"disaggregation_mode": Foreign.AGGREGATED, "serving_mode": Foreign.PREFILL}, MODES.AGGREGATED),
        ({"disaggregation_mode": MODES.ENCODE}, MODES.ENCODE),
    ],
)
def test_a_foreign_mode_is_known_by_its_members_name(settings: dict[str, Any], mode: DisaggregationMode) -> None:
    config = WorkerConfig.from_runtime_config(SimpleNamespace(**settings))
    assert (config.disaggregation_mode, config.component) == (mode, mode.component)


@pytest.mark.parametrize("mode", ["prefill", 1, True, ["prefill"]])
def test_a_mode_that_is_no_enum_is_a_type_error_unless_it_is_overridden(mode: object) -> None:
    given = SimpleNamespace(disaggregation_mode=mode)
    with pytest.raises(TypeError):
        WorkerConfig.from_runtime_config(given)
    assert WorkerConfig.from_runtime_config(given, disaggregation_mode=MODES.DECODE).disaggregation_mode == "decode"


def test_a_foreign_mode_with_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="BOTH") as refused:
        WorkerConfig.from_runtime_config(SimpleNamespace(disaggregation_mode=Foreign.BOTH))
    assert refused.value.field == "disaggregation_mode"


# -- endpoint types


@pytest.mark.parametrize(
    ("text", "surfaces"),
    [
        ("Chat, COMPLETIONS", ModelType.Chat | ModelType.Completions),
        ("embedding", ModelType.Embedding),
        ("embeddings,tensor", ModelType.Embedding | ModelType.TensorBased),
        ("image,images,video,videos,audio,audios", ModelType.Images | ModelType.Videos | ModelType.Audios),
        ("chat,,", ModelType.Chat),
    ],
)
def test_endpoint_types_are_a_list_with_commas(text: str, surfaces: ModelType) -> None:
    assert parse_endpoint_types(text) == surfaces


@pytest.mark.parametrize("text", ["prefill", "chat,prefill", "chats", "tensors", "chat completions", "*"])
def test_other_endpoint_types_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_endpoint_types(text)
    assert refused.value.field == "endpoint_types"


@pytest.mark.parametrize("text", ["", "  ", " , ,"])
def test_no_endpoint_type_at_all_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="endpoint_types cannot be empty"):
        parse_endpoint_types(text)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_input": "Text"}, "model_input"),
        ({"model_input": "Tensor"}, "model_input"),
        ({"route_to_encoder": True, "disaggregation_mode": MODES.DECODE}, "route_to_encoder"),
        ({"route_to_encoder": True, "disaggregation_mode": MODES.ENCODE}, "route_to_encoder"),
        ({"endpoint_types": "prefill"}, "endpoint_types"),
        ({"custom_jinja_template": "no/such/file"}, "custom_jinja_template"),
        ({"custom_jinja_template": "x" * 5000}, "custom_jinja_template"),
        ({"metrics_labels": [("team", "a"), ("a-b", "c")]}, "metrics_labels"),
    ],
)
def test_what_no_worker_can_be_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    """The cases include the check of encode workers."""
    with pytest.raises(InvalidArgument) as refused:
        WorkerConfig(**changes).checked()
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("worker", "engine", "name"),
    [
        ("w", "e", "w"),
        (None, "e", "e"),
        ("", "e", "e"),
        (None, None, "m"),
        (" ", "", "m"),
    ],
)
def test_the_workers_name_goes_before_the_engines_before_the_models(
    worker: str | None, engine: str | None, name: str
) -> None:
    config = EngineConfig(model="m", served_model_name=engine)
    assert served_name(WorkerConfig(served_model_name=worker), config) == name
    assert served_name(WorkerConfig(), EngineConfig(model="")) == ""


# -- times


@pytest.mark.parametrize(
    ("text", "grace_s"),
    [
        (None, 5.0),
        ("", 5.0),
        ("abc", 5.0),
        ("nan", 5.0),
        ("inf", 5.0),
        ("-inf", 5.0),
        ("1_0", 5.0),
        ("-3", 0.0),
        ("-0.0", 0.0),
        ("0", 0.0),
        ("2.5", 2.5),
        ("1e1", 10.0),
    ],
)
def test_the_grace_period_is_read_leniently(text: str | None, grace_s: float) -> None:
    environment = {} if text is None else {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": text}
    assert ShutdownTimes.from_environment(environment).grace_s == grace_s


@pytest.mark.parametrize(
    ("text", "timeout_s"),
    [(None, 30), ("", 30), ("abc", 30), ("-1", 30), ("2.5", 30), ("²", 30), ("0", 0), ("7", 7), ("9" * 99, 30)],
)
def test_the_timeout_is_a_whole_number(text: str | None, timeout_s: float) -> None:
    environment = {} if text is None else {"DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": text}
    assert ShutdownTimes.from_environment(environment).timeout_s == timeout_s


@pytest.mark.parametrize(("times", "deadline_s"), [((5.0, 30.0), 35.0), ((5.1, 5.0), 10.1), ((-1.0, 5.0), 5.0)])
def test_the_deadline_adds_the_grace_to_the_timeout(times: tuple[float, float], deadline_s: float) -> None:
    assert evolve(ShutdownTimes(), grace_s=times[0], timeout_s=times[1]).deadline_s == pytest.approx(deadline_s)
