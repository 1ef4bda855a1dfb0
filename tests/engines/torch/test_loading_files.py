"""Real files through transformers: a folder, damaged ones, and a load that is given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.torch import LoadedModel, LoadingProgress, ModelFiles, load_model
from pipeline import Cancelled, InvalidArgument

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

EOS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand random weights in bfloat16, as `save_pretrained` writes it."""
    transformers: Any = pytest.importorskip("transformers")
    torch: Any = pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**sizes, **heads, eos_token_id=EOS)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", "torch.float32"), ("float32", "torch.float32"), ("bfloat16", "torch.bfloat16")]
)
def test_a_folder_is_loaded_in_the_wanted_dtype(folder: Path, dtype: Any, expected: str) -> None:
    loaded = load_model(ModelFiles(folder), device="cpu", dtype=dtype)
    assert isinstance(loaded, LoadedModel)
    assert (loaded.name, loaded.eos_token_ids) == ("tiny", (EOS,))
    assert (str(loaded.model.dtype), str(loaded.model.device), loaded.model.training) == (expected, "cpu", False)


def test_every_tensor_is_reported(folder: Path) -> None:
    seen: list[LoadingProgress] = []
    loaded = load_model(ModelFiles(folder), device="cpu", report=seen.append)
    assert seen[0] == LoadingProgress("reading")
    weights = [progress for progress in seen if progress.step == "loading weights"]
    assert [progress.done for progress in weights] == [*range(1, len(weights) + 1)]
    assert {progress.total for progress in weights} == {len(weights)} == {len(loaded.model.state_dict())}


def test_a_report_that_raises_ends_the_load_and_the_next_one_works(folder: Path) -> None:
    def give_up(progress: LoadingProgress) -> None:
        if progress.done == 2:
            raise Cancelled("the server is closing")

    with pytest.raises(Cancelled, match="closing"):
        load_model(ModelFiles(folder), device="cpu", report=give_up)
    assert load_model(ModelFiles(folder), device="cpu").name == "tiny"


def test_the_bars_of_transformers_are_back_after_a_load(folder: Path) -> None:
    logging: Any = pytest.importorskip("transformers.utils.logging")
    gguf: Any = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    before = gguf.tqdm, logging.get_verbosity()
    load_model(ModelFiles(folder), device="cpu")
    assert (gguf.tqdm, logging.get_verbosity()) == before
    assert logging.set_tqdm_hook(None) is None


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_a_device_that_is_not_there_is_refused_by_name(folder: Path, device: str) -> None:
    with pytest.raises(InvalidArgument, match=device) as refused:
        load_model(ModelFiles(folder), device=device)
    assert refused.value.field == "device"


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be loaded") as refused:
        load_model(ModelFiles(tmp_path), device="cpu")
    assert refused.value.field == "model_path"


def test_damaged_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InvalidArgument, match="cannot be loaded"):
        load_model(ModelFiles(tmp_path), device="cpu")


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00 and nothing behind")
    with pytest.raises(InvalidArgument, match="cannot be loaded"):
        load_model(ModelFiles(tmp_path / "model.gguf"), device="cpu")
