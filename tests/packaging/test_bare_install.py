"""What the core promises without extras, in an environment that has the wheel and what it depends on, and no more."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from serving import __main__ as program

Run = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))

NEEDS: dict[str, str] = {
    "engines.upstream": "engines.upstream needs httpcore2: pip install 'penstock[upstream]'",
    "pipeline.network.nats": "pipeline.network.nats needs nats: pip install 'penstock[nats]'",
    "serving.cli": "serving.cli needs cyclopts: pip install 'penstock[serve]'",
    **dict.fromkeys(
        ("serving.http", *(f"serving.http.{part}" for part in ("generation", "metrics"))),
        "serving.http needs starlette: pip install 'penstock[serve]'",
    ),
    "serving.live": "serving.live needs httpcore2: pip install 'penstock[serve]'",
    "serving.replay.page": "serving.replay.page needs plotly: pip install 'penstock[report]'",
    "serving.socket": "serving.socket needs httptools: pip install 'penstock[serve]'",
}
"""Faces that an extra brings, with the last line of their error without it."""

EXAMPLE_NEEDS: dict[str, str] = {
    "embed_fastapi": "No module named 'fastapi'",
    "embed_ray_serve": "No module named 'fastapi'",
    "replay_in_test": "the table of a report needs rich: pip install 'penstock[serve]'",
    "swap_in_test": "No module named 'pytest'",
}
"""The same for examples. Three of them show how to use penstock together with a foreign library."""

WITH_EXTRAS = (
    "pipeline/network/files/test_folder_processes.py",
    "pipeline/network/nats",
    "pipeline/network/tcp/test_sockets.py",
    "pipeline/telemetry/test_prometheus.py",
)
"""Tests of the core that need a library of an extra, certificates, or the benchmarks."""


def faces() -> list[str]:
    """Every folder of the product that is a package: what other code imports from."""
    files = [path for top in ("pipeline", "operators", "engines", "serving") for path in (ROOT / top).rglob("*.py")]
    packages = {".".join(path.relative_to(ROOT).parent.parts) for path in files if path.name == "__init__.py"}
    modules = {f"pipeline.{path.stem}" for path in (ROOT / "pipeline").glob("*.py") if path.stem != "__init__"}
    return sorted(packages | modules)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_environment_has_no_library_of_an_extra(bare: Run, tmp_path: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {re.split(r"[>=;\[ ]", one)[0] for extra in extras.values() for one in extra}
    code = "from importlib.metadata import distributions\nprint(*[one.name for one in distributions()])"
    there = {name.lower().replace("_", "-") for name in bare("-c", code, cwd=tmp_path).stdout.split()}
    assert "penstock" in there
    assert there & named == set()


def test_the_graph_of_the_readme_runs(bare: Run, tmp_path: Path) -> None:
    (graph,) = blocks("README.md")
    ran = bare("-W", "error", "-c", graph, cwd=tmp_path)
    assert ran.stdout.split() == ["H", "e", "l", "l", "o"], ran.stderr


def test_every_package_can_be_imported_or_names_the_extra_that_brings_what_it_needs(bare: Run, tmp_path: Path) -> None:
    code = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error, sep="\\t")
"""
    ran = bare("-W", "error", "-c", code, *faces(), cwd=tmp_path)
    assert ran.stderr == ""
    assert dict(line.split("\t") for line in ran.stdout.splitlines()) == NEEDS


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_or_names_what_it_needs(name: str, bare: Run, tmp_path: Path) -> None:
    ran = bare("-W", "error", str(ROOT / "examples" / f"{name}.py"), cwd=tmp_path)
    if name in EXAMPLE_NEEDS:
        assert last_line(ran.stderr) == f"ModuleNotFoundError: {EXAMPLE_NEEDS[name]}"
    else:
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout


def test_the_engine_of_the_docs_is_proved_and_used(bare: Run, tmp_path: Path) -> None:
    page = blocks("docs/engines.md")
    (tmp_path / "backwards.py").write_text(next(block for block in page if "class Backwards(" in block))
    used = [block for block in page if "from backwards import" in block and "anyio.run(" in block]
    proof, alone = [
        next(block for block in used if f"import {name}" in block) for name in ("run_conformance", "as_engine")
    ]
    proved = bare("-W", "error", "-c", proof, cwd=tmp_path)
    assert (proved.returncode, proved.stderr) == (0, "")
    assert bare("-W", "error", "-c", alone, cwd=tmp_path).stdout == "[[3], [2], [1], []]\n"


@pytest.mark.parametrize("arguments", [[], ["serve"], ["worker", "backwards:Backwards"], ["replay", "--help"]])
def test_the_program_ends_with_one_line_that_names_the_extra(arguments: list[str], bare: Run, tmp_path: Path) -> None:
    ran = bare("-m", "serving", *arguments, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "penstock: cyclopts is missing; install the program with: pip install 'penstock[serve]'\n"


def test_the_installed_command_is_the_program(bare: Run, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\nfrom pathlib import Path\n"
        "sys.exit(subprocess.run([Path(sys.executable).with_name('penstock')]).returncode)"
    )
    ran = bare("-c", code, cwd=tmp_path)
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert ran.stderr.startswith("penstock: cyclopts is missing")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "from operators import Model; Model.from_folder('.')",
            "ModuleNotFoundError: HuggingFaceTokenizer needs tokenizers: pip install 'penstock[serve]'",
        ),
        (
            "from pipeline.testing import run_in_virtual_time; run_in_virtual_time(print, backend='trio')",
            "ModuleNotFoundError: virtual time on trio needs trio, which penstock does not bring: pip install trio",
        ),
    ],
)
def test_what_needs_more_names_it(code: str, error: str, bare: Run, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert last_line(bare("-c", code, cwd=tmp_path).stderr) == error


def test_the_tests_of_the_core_pass_without_extras(bare_with_test_tools: Run, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignored = [f"--ignore=tests/{name}" for name in WITH_EXTRAS]
    ran = bare_with_test_tools(
        *("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "tests/pipeline", *ignored), cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr


def test_the_program_knows_the_libraries_of_its_extra() -> None:
    """Of the environment of this run: the names under which they are imported are not in the bare one."""
    serve: list[Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["serve"]
    wanted = {re.split(r"[>=; ]", one)[0].lower() for one in serve}
    found = {
        module
        for module, distributions in packages_distributions().items()
        if wanted & {name.lower().replace("_", "-") for name in distributions} and not module.startswith("_")
    }
    assert found == program._EXTRA
