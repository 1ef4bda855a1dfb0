"""What is refused before a model is read, and the reports that stand in for the bars of transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engines.torch import LoadingProgress, ModelFiles, load_model
from engines.torch.loading import _Steps
from pipeline import InvalidArgument


@pytest.mark.parametrize("name", ["nothing.gguf", "nothing"])
def test_a_model_that_is_not_there_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=name) as refused:
        load_model(ModelFiles(tmp_path / name))
    assert refused.value.field == "model_path"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"neither a model folder nor a \.gguf file"):
        load_model(ModelFiles(tmp_path / "model.bin"))


def test_a_dtype_that_is_none_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="float32, bfloat16") as refused:
        load_model(ModelFiles(tmp_path), dtype="int3")  # type: ignore[arg-type]
    assert refused.value.field == "dtype"


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'penstock\[torch\]'"):
        load_model(ModelFiles(tmp_path))


def test_importing_the_face_loads_neither_library() -> None:
    code = "import engines.torch, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(("path", "name"), [("a/my-model", "my-model"), ("a/Small.Q4_1.gguf", "Small.Q4_1")])
def test_a_model_is_named_by_its_folder_or_file(path: str, name: str) -> None:
    assert ModelFiles(path).name == name


class TestSteps:
    """The object in the place of a tqdm bar."""

    def test_each_item_is_reported_once_it_is_done(self) -> None:
        seen: list[LoadingProgress] = []
        steps = _Steps(seen.append, ["a", "b"], desc="Converting and de-quantizing GGUF tensors...")
        assert list(steps) == ["a", "b"]
        assert seen == [LoadingProgress("converting", 1, 2), LoadingProgress("converting", 2, 2)]

    def test_a_bar_without_items_is_moved_by_hand(self) -> None:
        seen: list[LoadingProgress] = []
        with _Steps(seen.append, total=4, desc="Loading weights") as steps:
            steps.set_postfix_str("shard 1")
            steps.update(3)
            steps.close()
        assert seen == [LoadingProgress("loading weights", 3, 4)]
