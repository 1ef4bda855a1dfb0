"""Both type checkers and `link` refuse each of the wrong graphs, and nothing else in their file."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import LinkError

ROOT = Path(__file__).parents[2]
WRONG = Path(__file__).with_name("wrong_graphs.py")
MARK = re.compile(r"^def (?P<case>\w+)\(.*\n.*# wrong: (?P<above>\S+), (?P<below>\S+)$", re.MULTILINE)
CASES = {match["case"]: (match["above"], match["below"]) for match in MARK.finditer(WRONG.read_text())}
MARKED_LINES = {number for number, line in enumerate(WRONG.read_text().splitlines(), 1) if "# wrong: " in line}


def _load(case: str) -> Callable[[], object]:
    spec = importlib.util.spec_from_file_location("wrong_graphs", WRONG)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make: Callable[[], object] = getattr(module, case)
    return make


def test_every_marked_line_is_a_case() -> None:
    assert len(CASES) == len(MARKED_LINES) >= 10


@pytest.mark.parametrize("case", CASES)
def test_link_refuses_a_wrong_graph_and_names_both_stages(case: str) -> None:
    make = _load(case)
    with pytest.raises(LinkError) as caught:
        make()
    assert all(name in str(caught.value) for name in CASES[case]), str(caught.value)


def _mypy(_: Path) -> set[int]:
    command = [sys.executable, "-m", "mypy", "--output", "json", "--follow-imports", "silent", str(WRONG)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {message["line"] for message in found if message["severity"] == "error"}


def _pyright(folder: Path) -> set[int]:
    # The project's own configuration leaves the file out, and pyright then does so even if it is named: so a copy.
    (folder / WRONG.name).write_text(WRONG.read_text())
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps({"include": [WRONG.name], "extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {message["range"]["start"]["line"] + 1 for message in found if message["severity"] == "error"}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [_mypy, _pyright])
def test_a_type_checker_reports_each_wrong_graph_and_nothing_else(
    checker: Callable[[Path], set[int]], tmp_path: Path
) -> None:
    assert checker(tmp_path) == MARKED_LINES
