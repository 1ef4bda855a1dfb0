"""docs/torch.md: its program runs, and its table has the arguments that there are."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import attrs
import pytest

from serving.deployment.torch_workers import TorchArgs

TEXT = (Path(__file__).parents[1] / "docs" / "torch.md").read_text()


def test_every_argument_but_the_role_has_a_row() -> None:
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \| [^|]+ \|$", TEXT, re.MULTILINE)
    rows = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert rows == {one.name for one in attrs.fields(TorchArgs)} - {"role"}  # which the worker's mode gives


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
def test_the_program_prints_eight_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "my-model")
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("program.py", run_name="__main__")
    assert len(re.findall(r"\d+", capsys.readouterr().out)) == 8
