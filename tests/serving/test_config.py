"""What a standard graph may be built from, and which mistake is named how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from engines import DisaggregationMode, EchoEngine, WorkerConfig
from engines.mocker import MockEngine
from operators import Model
from operators.kv import KvRouterConfig
from pipeline import InvalidArgument
from serving.deployment import GraphConfig


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"workers": 0}, "workers"),
        ({"router": "nearest"}, "router"),
        ({"router": "kv", "kv_router": KvRouterConfig(min_initial_workers=3), "workers": 2}, "min_initial_workers"),
        ({"router": "kv", "kv_router": KvRouterConfig(conditional_disagg_enabled=True)}, "conditional_disagg_enabled"),
        ({"engine": "gpt"}, "engine"),
        ({"engine_args": {"delay_s": "soon"}}, "engine_args.delay_s"),
        ({"engine_args": {"volume": "1"}}, "engine_args.volume"),
        ({"engine": "mocker", "engine_args": {"num_gpu_blocks": "0"}}, "engine_args.num_gpu_blocks"),
        ({"engine": "mocker", "engine_args": {"worker_type": "decode"}}, "engine_args.worker_type"),
        ({"worker": WorkerConfig(endpoint_types="prefill")}, "endpoint_types"),
        ({"model_name": " "}, "model_name"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        GraphConfig(**fields)
    assert failure.value.field == place


def test_each_worker_gets_an_engine_of_its_own() -> None:
    config = GraphConfig(engine_args={"delay_s": "0.5"}, workers=2)
    first, second = anyio.run(config.make_engines, 2)
    assert first is not second
    assert isinstance(first, EchoEngine)
    assert first.delay_s == 0.5


def test_without_a_folder_the_built_in_model_is_served() -> None:
    assert GraphConfig().load_model().name == "echo"
    assert GraphConfig(model_name="parrot").load_model().name == "parrot"


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        GraphConfig(model_path=tmp_path).load_model()


def test_mock_engines_have_the_role_of_their_worker_and_share_an_exchange() -> None:
    decode = WorkerConfig(disaggregation_mode=DisaggregationMode.DECODE)
    config = GraphConfig(engine="mocker", worker=decode, engine_args={"block_size": "16"})
    first, second = anyio.run(config.make_engines, 2)
    assert isinstance(first, MockEngine)
    assert isinstance(second, MockEngine)
    assert (first.args.worker_type, first.args.block_size) == ("decode", 16)
    assert first.exchange is second.exchange


def test_workers_are_published_under_the_model_they_serve() -> None:
    config = GraphConfig(model_name="parrot")
    settings = config.worker_settings(config.load_model())
    assert (settings.namespace, settings.component, settings.endpoint) == ("penstock", "backend", "generate")
    assert (settings.model_name, settings.served_model_name) == ("", "parrot")
    named = WorkerConfig(model_name="elsewhere/model")
    assert GraphConfig(worker=named).worker_settings(Model.byte_level()) is named


def test_each_mock_worker_listens_at_ports_of_its_own() -> None:
    texts = {"zmq_kv_events_port": "5600", "dp_size": "2"}
    engines = anyio.run(GraphConfig(engine="mocker", engine_args=texts).make_engines, 3)
    assert [getattr(engine, "args").zmq_kv_events_port for engine in engines] == [5600, 5602, 5604]  # noqa: B009


def test_a_mock_engine_is_no_encode_worker() -> None:
    with pytest.raises(InvalidArgument) as refused:
        GraphConfig(engine="mocker", worker=WorkerConfig(disaggregation_mode=DisaggregationMode.ENCODE))
    assert refused.value.field == "engine"


def test_a_template_of_the_worker_replaces_the_models(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("said: {{ messages[-1].content }}")
    model = GraphConfig(worker=WorkerConfig(custom_jinja_template=template)).load_model()
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": "user", "content": "hi"}]) == "said: hi"
    template.write_text("{% broken")
    with pytest.raises(InvalidArgument) as refused:
        GraphConfig(worker=WorkerConfig(custom_jinja_template=template)).load_model()
    assert refused.value.field == "custom_jinja_template"


def test_only_a_mock_engine_takes_prompts_in_the_ids_of_any_model() -> None:
    assert not GraphConfig(engine="mocker").load_model().checks_token_ids
    assert GraphConfig(engine="echo").load_model().checks_token_ids


def test_workers_that_share_a_runtime_are_in_a_namespace_of_their_model() -> None:
    config = GraphConfig(worker=WorkerConfig(namespace="here"))
    assert config.in_namespace_of("tiny").worker.namespace == "here-tiny"
    other, same = config.in_namespace_of("Org/Tiny"), config.in_namespace_of("org/tiny")
    assert other.worker.namespace.startswith("here-org-tiny-")
    assert other.worker.namespace != same.worker.namespace


@pytest.mark.parametrize(
    "fields",
    [{"engine": "mocker"}, {"workers": 2}, {"prefill_workers": 1}, {"model_name": "m"}, {"model_path": Path()}],
)
def test_a_front_end_of_announced_workers_has_neither_engine_nor_model(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(InvalidArgument, match="other processes") as refused:
        GraphConfig(is_announced=True, **fields)
    assert refused.value.field == name


def test_the_router_of_a_front_end_may_wait_for_workers_and_insist_on_prefill_workers() -> None:
    GraphConfig(is_announced=True, router="kv", kv_router=KvRouterConfig(min_initial_workers=5), enforce_disagg=True)
    with pytest.raises(InvalidArgument):
        GraphConfig(router="kv", kv_router=KvRouterConfig(min_initial_workers=5))
