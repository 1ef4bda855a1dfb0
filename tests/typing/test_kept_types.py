"""Both type checkers know the types that `kept_types.py` names, and would report a type that was lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("kept_types.py")


@pytest.mark.slow
@pytest.mark.parametrize("checker", [["mypy", "--follow-imports", "silent"], ["pyright"]])
def test_a_type_checker_knows_each_of_these_types(checker: list[str]) -> None:
    command = [sys.executable, "-m", *checker, str(KEPT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
