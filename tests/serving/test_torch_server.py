"""A language model behind the real server: `penstock serve --engine torch --model smollm2`."""

from __future__ import annotations

import http.client
import json
import os
import pty
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from engines.torch import LoadedModel, ModelFiles, PeerHandover, TorchEngine, no_report
from pipeline import InvalidArgument
from serving.deployment import GraphConfig, UpstreamConfig
from serving.deployment.engines import Deployment
from serving.deployment.torch_workers import SharedModel
from serving.settings import ModelOptions
from tests.serving.worlds import program

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def engines_of(config: GraphConfig, count: int, deployment: Deployment | None = None) -> list[TorchEngine]:
    made = anyio.run(config.make_engines, count, deployment)
    return [engine for engine in made if isinstance(engine, TorchEngine)]


class TestConfig:
    """What is decided before anything is loaded; torch need not be there."""

    def test_a_torch_engine_without_a_model_is_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="--model-path, or --model smollm2"):
            GraphConfig(engine="torch")

    @pytest.mark.parametrize(
        ("arguments", "place"),
        [
            ({"dtype": "int3"}, "engine_args.dtype"),
            ({"max_num_seqs": "none"}, "engine_args.max_num_seqs"),
            ({"block_size_tokens": "0"}, "engine_args.block_size_tokens"),
            ({"role": "decode"}, "engine_args.role"),
            ({"colour": "red"}, "engine_args.colour"),
        ],
    )
    def test_a_wrong_argument_is_named(self, arguments: dict[str, str], place: str, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument) as refused:
            GraphConfig(engine="torch", model_path=tmp_path, engine_args=arguments)
        assert refused.value.field == place

    def test_arguments_reach_the_engine(self, tmp_path: Path) -> None:
        arguments = {"max_num_seqs": "3", "kv_cache_blocks": "none", "device": "cpu", "caches_prefixes": "false"}
        (engine,) = engines_of(GraphConfig(engine="torch", model_path=tmp_path, engine_args=arguments), 1)
        assert (engine.settings.max_num_seqs, engine.settings.caches_prefixes) == (3, False)
        assert (engine.settings.role, engine.handover) == ("aggregated", None)

    def test_workers_beside_prefill_workers_decode_and_hand_over(self, tmp_path: Path) -> None:
        (engine,) = engines_of(GraphConfig(engine="torch", model_path=tmp_path, prefill_workers=1), 1)
        assert engine.settings.role == "decode"
        assert isinstance(engine.handover, PeerHandover)

    def test_adapters_reach_each_engine(self, tmp_path: Path) -> None:
        folder = adapter_folder(tmp_path / "legal")
        options = ModelOptions(model_path=tmp_path, lora=(f"legal={folder}", f"a=b={folder}"))
        config = GraphConfig(engine="torch", **options.graph_fields())
        assert [engine._adapters for engine in engines_of(config, 2)] == [{"legal": folder, "a=b": folder}] * 2

    @pytest.mark.parametrize(
        ("others", "why"),
        [
            ({"engine": "mocker"}, "--engine torch only"),
            ({"engine": "echo", "upstream": UpstreamConfig(urls=("http://a",))}, "--engine torch only"),
            ({"model_name": "legal"}, "an adapter has the name of the model"),
            ({"lora": {"legal": Path("nowhere")}}, "nowhere has no adapter_config.json"),
        ],
    )
    def test_adapters_that_cannot_be_served_are_refused(self, others: dict[str, Any], why: str, tmp_path: Path) -> None:
        given: dict[str, Any] = {"engine": "torch", "lora": {"legal": adapter_folder(tmp_path / "legal")}}
        with pytest.raises(InvalidArgument, match=why) as refused:
            GraphConfig(model_path=tmp_path, **given | others)
        assert refused.value.field == "lora"

    @pytest.mark.parametrize("texts", [("legal",), ("=x",), ("legal=",), ("legal=x", "legal=y")])
    def test_an_adapter_is_given_as_name_and_folder_once(self, texts: tuple[str, ...]) -> None:
        with pytest.raises(InvalidArgument) as refused:
            ModelOptions(lora=texts).graph_fields()
        assert refused.value.field == "lora"

    def test_a_file_has_no_folder_for_the_card_of_a_worker(self, tmp_path: Path) -> None:
        config = GraphConfig(model_path=tmp_path / "small.gguf", model_name="small")
        settings = config.worker_settings(GraphConfig(model_name="small").load_model())
        assert settings.model_name == "small"
        assert settings.write_model is not None, "its text side is written for front ends"


def adapter_folder(path: Path) -> Path:
    """Return a folder that looks as peft writes it."""
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    return path


class Config:
    """A configuration of transformers, as far as it is looked at."""

    def __init__(self, rope_type: str) -> None:
        self.rope_parameters = {"rope_type": rope_type}

    def get_text_config(self) -> Config:
        return self


@pytest.mark.parametrize(("rope_type", "loads"), [("default", 1), ("yarn", 1), ("dynamic", 2), ("longrope", 2)])
def test_workers_share_the_weights_unless_computing_changes_them(
    rope_type: str, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[ModelFiles] = []

    def load(files: ModelFiles, **_: object) -> LoadedModel:
        loaded.append(files)
        return LoadedModel(SimpleNamespace(config=Config(rope_type)), "m")

    monkeypatch.setattr("serving.deployment.torch_workers.load_model", load)
    shared = SharedModel(ModelFiles(tmp_path), "cpu", "auto")
    first, second = shared.load(no_report), shared.load(no_report)
    assert (first is second, len(loaded)) == (loads == 1, loads)


def said(address: str, model: str = "smollm2") -> str:
    """The text of a streamed answer to the question."""
    body = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0, "stream": True}
    with closing(http.client.HTTPConnection(address, timeout=100)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        lines = answer.read().decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """Give a terminal to write to, and what was shown on it; a thread reads it, or its writer would have to wait."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the end of a terminal
            while data := os.read(ours, 65536):
                shown.append(data)

    reader = Thread(target=read)
    reader.start()
    try:
        yield theirs, shown
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


@pytest.mark.torch
@pytest.mark.parametrize("options", [[], ["--router", "kv", "--prefill-workers", "1"]])
def test_it_knows_the_capital_of_france(options: list[str]) -> None:
    """From one worker, and with a prompt that another one computes; a bar on the terminal before, an end in order."""
    serve = ["--engine", "torch", "--model", "smollm2", *options]
    variables = {"TERM": "xterm", "COLUMNS": "100"}
    with terminal() as (file, shown), program(*serve, stderr=file, variables=variables) as (process, address):
        assert "The capital of France is Paris" in said(address)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert b"Loading the model" in b"".join(shown)
    assert b"could not be fetched" not in b"".join(shown)


def smollm2_adapter(folder: Path) -> Path:
    """Write an adapter of smollm2's first layer, with random weights so large that it answers otherwise."""
    torch: Any = pytest.importorskip("torch")
    peft: Any = pytest.importorskip("peft")
    save_file = pytest.importorskip("safetensors.torch").save_file
    peft.LoraConfig(r=4, lora_alpha=64, target_modules=r".*layers\.0\.self_attn\.q_proj").save_pretrained(folder)
    torch.manual_seed(1)
    weights = {"lora_A": torch.randn(4, 576), "lora_B": torch.randn(576, 4)}
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{layer}.{name}.weight": weight for name, weight in weights.items()}, folder / "adapter_model.safetensors"
    )
    return folder


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
def test_an_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    """From a decode worker whose prompts another one computes, each with the adapter that the request names."""
    folder = smollm2_adapter(tmp_path / "odd")
    serve = ["--engine", "torch", "--model", "smollm2", "--prefill-workers", "1", "--router", "kv"]
    with program(*serve, "--lora", f"odd={folder}") as (process, address):
        with closing(http.client.HTTPConnection(address, timeout=100)) as connection:
            connection.request("GET", "/v1/models")
            models = json.loads(connection.getresponse().read())["data"]
        assert [model["id"] for model in models] == ["smollm2", "odd"]
        plain, odd = said(address), said(address, "odd")
        assert "The capital of France is Paris" in plain
        assert odd != plain
        assert [said(address, "odd"), said(address)] == [odd, plain]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
