"""The card a worker publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from engines import DisaggregationMode, EchoEngine, EngineConfig, ShutdownTimes, Worker, WorkerConfig
from engines.worker.registration import card_of, with_objects
from pipeline import InvalidArgument, Unavailable
from pipeline.llm import checked_file
from pipeline.llm.model_folder import card_checksum, file_checksum
from pipeline.network import ObjectName, Runtime
from pipeline.network.objects import InProcessObjects
from pipeline.protocols.card import (
    ByteLevel,
    DisaggregatedEndpoint,
    ModelDeploymentCard,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
)
from pipeline.wire import from_json, to_json

MODES = DisaggregationMode
BOTH = ModelType.Chat | ModelType.Completions
PREFILL, DECODE, ENCODE = WorkerType.PREFILL, WorkerType.DECODE, WorkerType.ENCODE


def card(worker: dict[str, Any] | None = None, **engine: Any) -> ModelDeploymentCard:
    return card_of(WorkerConfig(**worker or {}), EngineConfig(**{"model": "m", **engine}))


@pytest.mark.parametrize(
    ("mode", "to_encoder", "model_type", "role", "needs"),
    [
        (MODES.AGGREGATED, False, BOTH, WorkerType.AGGREGATED, []),
        (MODES.AGGREGATED, True, BOTH, WorkerType.AGGREGATED, [[ENCODE]]),
        (MODES.PREFILL, False, ModelType.Prefill, PREFILL, [[DECODE]]),
        (MODES.PREFILL, True, ModelType.Prefill, PREFILL, [[DECODE, ENCODE]]),
        (MODES.DECODE, False, BOTH, DECODE, [[PREFILL]]),
        (MODES.ENCODE, False, ModelType(0), ENCODE, [[PREFILL, DECODE], [WorkerType.AGGREGATED]]),
    ],
)
def test_role_needs_and_surface_follow_the_mode(
    mode: DisaggregationMode, to_encoder: bool, model_type: ModelType, role: WorkerType, needs: list[Any]
) -> None:
    made = card({"disaggregation_mode": mode, "route_to_encoder": to_encoder})
    assert (made.model_type, made.role, made.needs, made.model_input) == (model_type, role, needs, "Tokens")


@pytest.mark.parametrize("promises", [True, False])
def test_the_card_carries_the_promise_that_prefills_may_be_stopped(promises: bool) -> None:
    config = card(stops_prefills=promises, runtime_data={"own": 1}).runtime_config
    assert from_json(to_json(config), ModelRuntimeConfig).stops_prefills is promises
    assert config.runtime_data["own"] == 1


@pytest.mark.parametrize("publishes", [None, False, True])
def test_the_card_shows_whether_the_engine_publishes_kv_events(publishes: bool | None) -> None:
    config = card(publishes_kv_events=publishes).runtime_config
    assert from_json(to_json(config), ModelRuntimeConfig).kv_event_publishing_enabled is publishes


@pytest.mark.parametrize(("mode", "needs"), [(MODES.DECODE, []), (MODES.PREFILL, [[DECODE]])])
def test_a_decode_worker_that_may_prefill_needs_no_other_worker(mode: DisaggregationMode, needs: list[Any]) -> None:
    assert card({"disaggregation_mode": mode, "may_prefill": True}).needs == needs


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("mode", list(MODES))
def test_decode_and_encode_workers_have_no_local_indexer(mode: DisaggregationMode, enabled: bool) -> None:
    made = card({"disaggregation_mode": mode, "enable_local_indexer": enabled})
    assert made.runtime_config.enable_local_indexer is (enabled and mode in (MODES.AGGREGATED, MODES.PREFILL))


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        (None, None, None),
        ("h", None, None),
        (None, 9, None),
        ("h", 9, DisaggregatedEndpoint("h", 9)),
        ("h", 0, DisaggregatedEndpoint("h", 0)),
    ],
)
def test_the_disaggregated_endpoint_needs_host_and_port(
    host: str | None, port: int | None, endpoint: DisaggregatedEndpoint | None
) -> None:
    made = card(bootstrap_host=host, bootstrap_port=port)
    assert made.runtime_config.disaggregated_endpoint == endpoint


def test_values_missing_from_the_engine_config_are_not_advertised() -> None:
    made = card().runtime_config
    assert (made.data_parallel_size, made.data_parallel_start_rank) == (1, 0)
    assert (made.context_length, made.total_kv_blocks, made.max_num_seqs, made.max_num_batched_tokens) == (None,) * 4


def test_values_of_engine_and_worker_are_advertised() -> None:
    made = card(
        {
            "tool_call_parser": "hermes",
            "reasoning_parser": "basic",
            "exclude_tools_when_tool_choice_none": False,
            "served_model_name": "shown",
        },
        model_aliases=["other"],
        context_length=4096,
        kv_cache_block_size=32,
        total_kv_blocks=100,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        data_parallel_size=4,
        data_parallel_start_rank=2,
        runtime_data={"key": [1]},
    )
    config = made.runtime_config
    assert (made.display_name, made.slug, made.aliases) == ("shown", "shown", ["other"])
    assert (made.kv_cache_block_size, made.context_length, made.effective_context_length) == (32, 4096, 4096)
    assert (config.total_kv_blocks, config.max_num_seqs, config.max_num_batched_tokens) == (100, 8, 2048)
    assert (config.data_parallel_size, config.data_parallel_start_rank) == (4, 2)
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "basic")
    assert not config.exclude_tools_when_tool_choice_none
    assert config.runtime_data == {"key": [1]}
    read = from_json(to_json(made), ModelDeploymentCard)
    assert (read, read.runtime_config) == (made, config)


def test_the_environment_may_give_a_stable_routing_id() -> None:
    made = card_of(WorkerConfig(), EngineConfig(model="m"), {"DYN_STABLE_ROUTING_ID": " one "})
    assert made.runtime_config.stable_routing_id == "one"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 777}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_model_name_that_is_a_folder_gives_the_files_of_it(folder: Path) -> None:
    made = card({"model_name": str(folder)}, kv_cache_block_size=64)
    assert (made.display_name, made.source_path, made.kv_cache_block_size) == ("m", str(folder), 64)
    assert made.tokenizer is not None
    assert made.tokenizer.file.checksum == file_checksum(folder / "tokenizer.json")
    assert (made.effective_context_length, made.context_length) == (777, 777), "projected for older readers"
    assert card({"model_name": str(folder)}, context_length=5).context_length == 5, "the engine's own wins"


def test_a_model_name_that_is_no_path_is_only_a_name() -> None:
    made = card({"model_name": "Org/Model"})
    assert (made.display_name, made.source_path, made.tokenizer, made.model_info) == ("m", "Org/Model", None, None)
    assert (made.kv_cache_block_size, made.context_length) == (16, None)
    assert card().source_path is None


def test_an_own_template_stands_in_the_card(folder: Path) -> None:
    template = folder / "mine.jinja"
    template.write_text("{{ messages }}")
    for model_name in ("", str(folder)):
        made = card({"custom_jinja_template": template, "model_name": model_name})
        assert made.chat_template_file is not None
        assert (made.chat_template_file.is_custom, made.chat_template_file.file.path) == (True, str(template))
    assert card_checksum(made) != card_checksum(card({"model_name": str(folder)}))


@pytest.mark.parametrize(
    ("worker", "engine", "field"),
    [
        ({}, {"model": ""}, "model"),
        ({"model_name": __file__}, {}, Path(__file__).name),
        ({"model_name": "x" * 5000}, {}, "model_name"),
        ({"custom_jinja_template": "no/such/file"}, {}, "model_name"),
    ],
)
def test_values_that_make_no_valid_card_are_refused(worker: dict[str, Any], engine: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        card(worker, **engine)
    assert refused.value.field == field


async def test_the_files_of_a_card_are_stored_as_objects_of_their_own_names(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    objects = InProcessObjects()
    made = await with_objects(card({"model_name": str(folder)}), objects)
    stored = [tagged.file for tagged in made.files if tagged is not None]
    assert len(stored) >= 2
    for number, file in enumerate(stored):
        assert file.sha256 is not None
        assert file.size is not None
        await objects.get(ObjectName(file.sha256, file.size), tmp_path / f"{number}")
        assert checked_file(tmp_path / f"{number}").checksum == file.checksum
    assert from_json(to_json(made), ModelDeploymentCard).files == made.files
    assert made == card({"model_name": str(folder)})


async def test_a_file_that_is_gone_before_it_is_stored_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    made = card({"model_name": str(folder)})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidArgument, match="cannot be read") as refused:
        await with_objects(made, InProcessObjects())
    assert refused.value.field == "model_name"


async def test_objects_that_cannot_be_stored_are_the_error_of_the_worker(folder: Path) -> None:
    class Full(InProcessObjects):
        async def put(self, path: Path) -> ObjectName:
            raise Unavailable("no space left")

    with pytest.raises(Unavailable, match="no space left"):
        await with_objects(card({"model_name": str(folder)}), Full())


def test_the_built_in_model_is_in_the_card() -> None:
    parts = ByteLevel("{{ messages[-1].content }}", checks_token_ids=False)
    made = card({"byte_level": parts})
    assert from_json(to_json(made), ModelDeploymentCard).byte_level == parts
    assert "byte_level" not in json.loads(to_json(card()))
    others = [card(), card({"byte_level": ByteLevel("x", checks_token_ids=False)})]
    others.append(card({"byte_level": ByteLevel(parts.chat_template)}))
    assert all(card_checksum(other) != card_checksum(made) for other in others)


def test_a_card_states_whether_the_worker_tokenizes() -> None:
    made = card({"tokenizes": True})
    assert from_json(to_json(made), ModelDeploymentCard).tokenizes is True
    assert "tokenizes" not in json.loads(to_json(card()))
    assert card_checksum(made) != card_checksum(card())
    with pytest.raises(InvalidArgument, match="tokenizes"):
        from_json(json.dumps({**json.loads(to_json(made)), "tokenizes": "yes"}).encode(), ModelDeploymentCard)


@pytest.mark.parametrize("ending", ["end", "abort"])
async def test_each_adapter_has_a_card_that_goes_with_the_workers_own(ending: str) -> None:
    config = WorkerConfig(namespace="ns", adapters=("org/sql", "math"))
    async with Runtime.in_process() as runtime:
        async with Worker(EchoEngine(), config, runtime=runtime, environment={}, times=ShutdownTimes(0, 1)) as worker:
            models = await runtime.discovery.models()
            assert {one.suffix for one in models} == {None, "org/sql", "math"}
            assert {one.card.lora.name for one in models if one.card.lora is not None} == {"org/sql", "math"}
            assert {one.instance_id for one in models} == {worker.worker_id}
            if ending == "abort":
                worker.abort()
                await anyio.sleep(0.1)
                assert await runtime.discovery.models() == []
        assert await runtime.discovery.models() == []


async def test_a_model_that_is_no_folder_is_written_into_one_for_its_card() -> None:
    folders: list[Path] = []

    def write(path: Path) -> None:
        folders.append(path)
        (path / "tokenizer.json").write_text("{}")

    config = WorkerConfig(model_name="small.gguf", served_model_name="small", write_model=write)
    async with Worker(EchoEngine(), config, environment={}, times=ShutdownTimes(0, 1)) as worker:
        made = worker.card
        assert made is not None
        assert (made.display_name, made.source_path) == ("small", "small.gguf")
        assert made.tokenizer is not None
        assert made.tokenizer.file.sha256 is not None
    assert not folders[0].exists()


async def test_a_model_that_cannot_be_written_is_the_error_of_the_worker() -> None:
    def write(path: Path) -> None:
        raise OSError("no space left")

    config = WorkerConfig(model_name="small.gguf", write_model=write)
    with pytest.raises(InvalidArgument, match="no space left"):
        await Worker(EchoEngine(), config, environment={}).__aenter__()


async def test_adapters_come_and_go_while_the_worker_serves() -> None:
    config = WorkerConfig(namespace="ns", adapters=("sql",))
    async with Runtime.in_process() as runtime:

        async def announced() -> list[str]:
            return sorted(one.suffix for one in await runtime.discovery.models() if one.suffix is not None)

        worker = Worker(EchoEngine(), config, runtime=runtime, environment={}, times=ShutdownTimes(0, 1))
        await worker.announce_adapters(["early"])
        async with worker:
            assert await announced() == ["sql"]
            await worker.announce_adapters(["sql", "math"])
            assert await announced() == ["math", "sql"]
            await worker.announce_adapters(["math"])
            assert await announced() == ["math"]
            assert worker.served is not None
            await worker.served.unpublish()
            assert await announced() == []
            await worker.announce_adapters(["late"])
            assert await announced() == []
        assert await runtime.discovery.models() == []
