"""Model cards: context length, checksum, flags, files, and cards from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from pipeline.errors import InvalidArgument
from pipeline.llm import architectural_context_length, card_from_folder, checked_file
from pipeline.llm.model_folder import card_checksum, file_checksum
from pipeline.protocols.card import (
    CheckedFile,
    LoraInfo,
    ModelDeploymentCard,
    ModelInfoFile,
    ModelRuntimeConfig,
    ModelType,
    PromptFormatterFile,
    TokenizerFile,
    WorkerType,
    slugify,
)
from pipeline.protocols.field_rules import InvalidRecord
from pipeline.wire import from_json, from_plain, to_json, to_plain

DIGEST = "blake3:" + "ab" * 32
OTHER_DIGEST = "blake3:" + "cd" * 32


def card(**changes: Any) -> ModelDeploymentCard:
    return evolve(ModelDeploymentCard.named("Org/Model", kv_cache_block_size=16), **changes)


@pytest.mark.parametrize(
    ("runtime", "architectural", "legacy", "effective"),
    [
        (None, None, None, 0),
        (None, 32768, None, 32768),
        (8192, 32768, None, 8192),
        (0, 32768, 5, 0),
        (None, None, 5, 5),
        (None, 7, 5, 7),
    ],
)
def test_the_workers_context_length_wins(
    runtime: int | None, architectural: int | None, legacy: int | None, effective: int
) -> None:
    made = card(
        runtime_config=ModelRuntimeConfig(context_length=runtime),
        architectural_max_context_length=architectural,
        context_length=legacy,
    )
    assert made.effective_context_length == effective
    assert to_plain(made.with_projected_context()).get("context_length") == (effective or None)


@pytest.mark.parametrize(
    "changes",
    [
        {"runtime_config": ModelRuntimeConfig(taints={"a"})},
        {"runtime_config": ModelRuntimeConfig(kv_event_publishing_enabled=True, total_kv_blocks=5)},
        {"user_data": {"x": 1}},
        {"lora": LoraInfo("l")},
        {"model_type": ModelType.Embedding},
        {"model_input": "Tokens"},
        {"source_path": "Org/Model"},
        {"migration_limit": 9},
        {"aliases": []},
    ],
)
def test_what_is_a_workers_own_does_not_change_the_checksum(changes: dict[str, Any]) -> None:
    assert card_checksum(card(**changes)) == card_checksum(card())
    assert card(**changes) == card()


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_type": WorkerType.PREFILL},
        {"needs": [[WorkerType.PREFILL]]},
        {"needs": [[WorkerType.PREFILL, WorkerType.ENCODE]]},
        {"needs": [[WorkerType.PREFILL], [WorkerType.ENCODE]]},
        {"display_name": "other"},
        {"source_path": "/elsewhere"},
        {"model_info": ModelInfoFile("hf_config_json", CheckedFile("p", DIGEST))},
        {"model_info": ModelInfoFile("hf_config_json", CheckedFile("p", OTHER_DIGEST))},
        {"tokenizer": TokenizerFile("hf_tokenizer_json", CheckedFile("p", DIGEST))},
        {"extra_files": [CheckedFile("a", DIGEST)]},
        {"prompt_context": ["x"]},
        {"context_length": 1},
        {"kv_cache_block_size": 32},
        {"router_config": {"a": 1}},
        {"indexer_identity": "i"},
        {"aliases": ["a", "b"]},
        {"aliases": ["b", "a"]},
    ],
)
def test_what_makes_the_model_changes_the_checksum(changes: dict[str, Any]) -> None:
    others = [card(), card(needs=[[WorkerType.DECODE]]), card(extra_files=[CheckedFile("b", DIGEST)])]
    assert all(card_checksum(card(**changes)) != card_checksum(other) for other in others)
    assert all(card(**changes) != other for other in others)


def test_equal_cards_have_equal_hashes_and_a_card_is_no_other_thing() -> None:
    assert len({card(), card(user_data=1), card(aliases=["a"])}) == 2
    assert card() != "card"


def test_the_checksum_is_computed_once_and_stays_here() -> None:
    made = card()
    first = card_checksum(made)
    made.display_name = "changed"
    assert card_checksum(made) == first
    assert len(first) == 64
    assert "mdc_sum" not in to_plain(made)


def test_a_changed_copy_has_a_checksum_of_its_own() -> None:
    made = card()
    first = card_checksum(made)
    assert card_checksum(evolve(made, display_name="changed")) != first
    assert card_checksum(evolve(made, user_data=1)) == first


def test_where_files_are_does_not_matter_and_their_order_neither() -> None:
    files = [CheckedFile("/x/a", DIGEST), CheckedFile("/y/b", OTHER_DIGEST, 5)]
    moved = [CheckedFile("/z/b", OTHER_DIGEST), CheckedFile("/z/a", DIGEST)]
    assert card_checksum(card(extra_files=files)) == card_checksum(card(extra_files=moved))
    swapped = [CheckedFile("/x/a", OTHER_DIGEST), CheckedFile("/y/b", DIGEST)]
    assert card_checksum(card(extra_files=files)) != card_checksum(card(extra_files=swapped))


MINIMAL = {
    "display_name": "m",
    "slug": "m",
    "kv_cache_block_size": 16,
    "migration_limit": 0,
    "model_type": "Chat",
    "model_input": "Text",
}


def test_a_card_of_an_older_worker_has_no_worker_type_and_no_needs() -> None:
    read = from_plain(MINIMAL, ModelDeploymentCard)
    assert (read.worker_type, read.needs, read.runtime_config) == (None, [], ModelRuntimeConfig())


@pytest.mark.parametrize("missing", MINIMAL)
def test_what_every_card_must_have_is_required(missing: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain({key: value for key, value in MINIMAL.items() if key != missing}, ModelDeploymentCard)
    assert refused.value.field == missing


def test_what_a_new_card_writes() -> None:
    plain = to_plain(card())
    assert {key: plain[key] for key in plain if key != "runtime_config"} == {
        "display_name": "Org/Model",
        "slug": "org_model",
        "kv_cache_block_size": 16,
        "migration_limit": 0,
        "model_type": "Chat|Completions",
        "model_input": "Text",
        **dict.fromkeys(["model_info", "tokenizer", "worker_type", "media_decoder", "media_fetcher"]),
        "needs": [],
    }


def test_roles_and_needs_travel() -> None:
    made = card(worker_type=WorkerType.DECODE, needs=[[WorkerType.PREFILL, WorkerType.ENCODE]])
    again = from_json(to_json(made), ModelDeploymentCard)
    assert again == made
    assert again.needs[0][1] is WorkerType.ENCODE


@pytest.mark.parametrize(
    ("worker_type", "model_type", "role"),
    [
        (None, ModelType.Prefill, WorkerType.PREFILL),
        (None, ModelType.Chat, WorkerType.AGGREGATED),
        (WorkerType.DECODE, ModelType.Prefill, WorkerType.DECODE),
    ],
)
def test_the_role_of_an_older_card_follows_its_flags(
    worker_type: WorkerType | None, model_type: ModelType, role: WorkerType
) -> None:
    assert card(worker_type=worker_type, model_type=model_type).role is role


def test_the_prefill_flag_opens_no_surface() -> None:
    assert ModelType.Prefill.endpoints(anthropic=True) == []
    assert ModelType.Prefill.names() == ["prefill"]
    assert to_plain(ModelType.Prefill) == "Prefill"


def test_flags_have_their_bits_order_and_surfaces() -> None:
    bits = [ModelType.Prefill, ModelType.Realtime, ModelType.Classify, ModelType.Pooling]
    assert [flag.value for flag in bits] == [16, 256, 512, 1024]
    assert (ModelType.Realtime | ModelType.Chat).names() == ["chat", "realtime"]
    assert (ModelType.Classify | ModelType.Pooling).endpoints() == ["classify", "pooling"]
    assert ModelType.Chat.endpoints() == ["chat_completions", "responses"]
    assert ModelType.Chat.endpoints(anthropic=True) == ["chat_completions", "responses", "messages"]
    assert ModelType.TensorBased.names() == ["tensor"]


@pytest.mark.parametrize("bits", range(0, 2048, 37))
def test_flags_are_read_back_from_their_names(bits: int) -> None:
    assert from_plain(to_plain(ModelType(bits)), ModelType) == ModelType(bits)


@pytest.mark.parametrize("wire", ["chat", "Chat|Wibble", 1, None, ["Chat"]])
def test_what_are_no_flags_is_refused(wire: Any) -> None:
    with pytest.raises(InvalidArgument):
        from_plain(wire, ModelType)


@pytest.mark.parametrize(("text", "role"), [("Decode", WorkerType.DECODE), (" encode ", WorkerType.ENCODE)])
def test_a_worker_type_is_parsed_leniently(text: str, role: WorkerType) -> None:
    assert WorkerType.parse(text) is role


@pytest.mark.parametrize("text", ["", "prefill|decode", "wibble"])
def test_a_text_that_is_no_worker_type_is_refused(text: str) -> None:
    with pytest.raises(InvalidRecord):
        WorkerType.parse(text)


@pytest.mark.parametrize(("name", "slug"), [("Org/Model-1.5 B", "org_model-1_5_b"), ("__x", "x"), ("a_b-c", "a_b-c")])
def test_a_slug_is_a_key(name: str, slug: str) -> None:
    assert slugify(name) == slug


FILE = {"path": "p", "checksum": DIGEST}


@pytest.mark.parametrize(
    ("cls", "wire"),
    [
        (CheckedFile, FILE),
        (CheckedFile, {**FILE, "size": 5}),
        (CheckedFile, {**FILE, "size": 5, "sha256": "0f" * 32}),
        (ModelInfoFile, {"hf_config_json": FILE}),
        (TokenizerFile, {"tik_token_model": FILE}),
        (PromptFormatterFile, {"hf_tokenizer_config_json": FILE}),
        (PromptFormatterFile, {"hf_chat_template": {"is_custom": True, "file": FILE}}),
    ],
)
def test_files_are_read_back_as_written(cls: Any, wire: Any) -> None:
    assert to_plain(from_plain(wire, cls)) == wire


def test_the_older_key_of_a_chat_template_is_read() -> None:
    read = from_plain({"hf_chat_template_jinja": {"is_custom": False, "file": FILE}}, PromptFormatterFile)
    assert to_plain(read) == {"hf_chat_template": {"is_custom": False, "file": FILE}}


@pytest.mark.parametrize(
    ("cls", "wire", "place"),
    [
        (CheckedFile, {"path": "p"}, "checksum"),
        (CheckedFile, {**FILE, "checksum": "ab" * 32}, "checksum"),
        (CheckedFile, {**FILE, "checksum": "blake3:" + "AB" * 32}, "checksum"),
        (CheckedFile, {**FILE, "checksum": DIGEST + "0"}, "checksum"),
        (CheckedFile, {**FILE, "checksum": DIGEST + "\n"}, "checksum"),
        (CheckedFile, {**FILE, "size": -1}, "size"),
        (CheckedFile, {**FILE, "sha256": "../../etc/passwd"}, "sha256"),
        (CheckedFile, {**FILE, "sha256": "AB" * 32}, "sha256"),
        (CheckedFile, {**FILE, "sha256": 1}, "sha256"),
        (CheckedFile, "p", ""),
        (ModelInfoFile, {"hf_config_json": {"path": 1}}, "hf_config_json.path"),
        (ModelInfoFile, {"hf_config_json": "p"}, "hf_config_json"),
        (ModelInfoFile, {"hf_tokenizer_json": FILE}, ""),
        (TokenizerFile, {}, ""),
        (PromptFormatterFile, {"hf_chat_template": FILE}, "hf_chat_template"),
        (PromptFormatterFile, {"hf_chat_template": {"is_custom": True}}, "hf_chat_template.file"),
    ],
)
def test_what_is_no_file_is_refused_at_its_place(cls: Any, wire: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain(wire, cls)
    assert refused.value.field == place


def test_a_file_checksum_is_blake3_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    # The published BLAKE3 test value of the empty input.
    empty = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert file_checksum(tmp_path / "empty") == empty
    assert checked_file(tmp_path / "empty") == CheckedFile(str(tmp_path / "empty"), empty, 0)


def folder(path: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text)
    return path


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({}, None),
        ({"config": {"max_position_embeddings": 4096}, "tokenizer_config": {"model_max_length": 1}}, 4096),
        ({"config": {"text_config": {"max_position_embeddings": 2048}}}, 2048),
        ({"config": {"max_position_embeddings": 1, "text_config": {"max_position_embeddings": 2}}}, 1),
        ({"config": {}, "tokenizer_config": {"model_max_length": 512}}, 512),
        ({"tokenizer_config": {"model_max_length": 512}}, 512),
        ({"config": {"max_position_embeddings": 0}}, None),
        ({"tokenizer_config": {"model_max_length": 0}}, None),
        ({"tokenizer_config": {"model_max_length": 10**30}}, None),
        ({"tokenizer_config": {"model_max_length": None}}, None),
        ({"config": '{"max_position_embeddings": 8, "a": Infinity, "b": [NaN, -Infinity]}'}, 8),
        ({"config": "{// why\n max_position_embeddings: 8, 'a': +1, /* x */ \"b\": [1,],}"}, 8),
    ],
)
def test_the_context_length_is_found_in_the_models_own_files(
    tmp_path: Path, files: dict[str, Any], length: int | None
) -> None:
    assert architectural_context_length(folder(tmp_path, **files)) == length


@pytest.mark.parametrize("value", [None, "4096", 4096.0, True, -1, 2**32])
@pytest.mark.parametrize("nested", [False, True])
def test_a_context_length_that_is_no_length_is_an_error(tmp_path: Path, value: Any, nested: bool) -> None:
    part = {"max_position_embeddings": value}
    config = {"text_config": part} if nested else part
    with pytest.raises(InvalidArgument):
        architectural_context_length(folder(tmp_path, config=config, tokenizer_config={"model_max_length": 512}))


@pytest.mark.parametrize("text", ["{broken", "[1]", "5", "[" * 100_000], ids=["broken", "list", "number", "deep"])
def test_a_configuration_that_is_no_object_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument):
        architectural_context_length(folder(tmp_path, config=text))


def test_a_card_from_a_folder_names_its_files(tmp_path: Path) -> None:
    folder(tmp_path, config={"max_position_embeddings": 9}, tokenizer={}, tokenizer_config={}, generation_config={})
    (tmp_path / "chat_template.jinja").write_text("x")
    made = card_from_folder(tmp_path, kv_cache_block_size=16, display_name="Org/Model")
    plain = to_plain(made)
    assert [list(plain[name]) for name in ("model_info", "tokenizer", "prompt_formatter", "gen_config")] == [
        ["hf_config_json"],
        ["hf_tokenizer_json"],
        ["hf_tokenizer_config_json"],
        ["hf_generation_config_json"],
    ]
    assert plain["chat_template_file"]["hf_chat_template"]["is_custom"] is False
    assert plain["slug"] == "org_model"
    assert made.effective_context_length == 9
    assert from_json(to_json(made), ModelDeploymentCard) == made


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_card_needs_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument) as refused:
        card_from_folder(tmp_path / name, kv_cache_block_size=16)
    assert refused.value.field == name


def test_the_current_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert card_from_folder(Path(), kv_cache_block_size=16).display_name == tmp_path.name


def test_an_empty_folder_gives_a_card_without_files(tmp_path: Path) -> None:
    made = card_from_folder(tmp_path, kv_cache_block_size=16)
    assert (made.display_name, made.model_info, made.effective_context_length) == (tmp_path.name, None, 0)
