"""The installed pytest plugin leaves projects alone that have modules of the same names as penstock's packages."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.slow

OWN = "MINE = True\n"
PROJECTS: dict[str, dict[str, str]] = {
    "nothing": {},
    "pipeline.py": {"pipeline.py": OWN},
    "engines/": {"engines/__init__.py": OWN},
    "both": {"pipeline.py": OWN, "engines/__init__.py": OWN},
    "all of them": {f"{name}/__init__.py": OWN for name in ("pipeline", "operators", "engines", "serving")},
    "a pipeline that cannot be imported": {"pipeline.py": "raise SystemExit('imported')"},
}
"""What a project has beside its tests."""

UNRELATED = """
import importlib.metadata, sys
from pathlib import Path

home = Path(importlib.metadata.distribution("penstock").locate_file("")).resolve()

def test_penstock_is_installed_and_loads_its_plugin_only():
    files = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    assert [file.name for file in files if file.is_relative_to(home)] == ["penstock_pytest.py"]
"""


def project(folder: Path, files: dict[str, str], test: str) -> Path:
    """The folder, with the files and the test in it."""
    for name, text in {**files, "test_it.py": test}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_that_uses_no_fixture_of_penstock_runs_as_without_it(
    name: str, installed: Run, tmp_path: Path
) -> None:
    ran = installed("-m", "pytest", "-W", "error", cwd=project(tmp_path, PROJECTS[name], UNRELATED))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


def test_a_project_imports_its_own_modules(installed: Run, tmp_path: Path) -> None:
    test = "import pipeline, engines\ndef test_own():\n    assert pipeline.MINE and engines.MINE\n"
    ran = installed("-m", "pytest", cwd=project(tmp_path, PROJECTS["both"], test))
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize(("fixture", "clash"), [("open_streams", "pipeline.py"), ("run_conformance", "engines/")])
def test_a_fixture_of_a_shadowed_package_fails_with_the_name_of_penstock_and_of_the_file_in_its_place(
    fixture: str, clash: str, imported: bool, installed: Run, tmp_path: Path
) -> None:
    module = clash.removesuffix(".py").removesuffix("/")
    test = f"{f'import {module}' if imported else ''}\ndef test_it({fixture}):\n    pass\n"
    ran = installed("-m", "pytest", cwd=project(tmp_path, PROJECTS[clash], test))
    assert ran.returncode == 1
    (file,) = PROJECTS[clash]
    assert f"the fixture '{fixture}' of penstock needs penstock's package '{module}'" in ran.stdout
    assert f"`import {module}` gives {tmp_path / file}" in ran.stdout
    assert "Traceback" not in ran.stdout


FIXTURES = """
import pytest
from pipeline import Context, identity
from pipeline.testing import ScriptedEngine

@pytest.fixture
def anyio_backend(virtual_time_backend):
    return virtual_time_backend

@pytest.mark.anyio
async def test_operator(check_operator, open_streams):
    await check_operator(identity, request=None, items=list(range(20)), rules=["O1"])

@pytest.mark.anyio
async def test_engine(check_engine):
    await check_engine(lambda: ScriptedEngine(range(20)), request=None, rules=["E1"])

def test_conformance(run_conformance):
    assert callable(run_conformance)

@pytest.mark.anyio
async def test_leak(open_streams):
    open_streams.kept = await ScriptedEngine([1, 2]).generate(Context(None))
    await anext(open_streams.kept)
"""


def test_every_fixture_works_in_a_project_that_shadows_nothing(installed: Run, tmp_path: Path) -> None:
    ran = installed("-m", "pytest", cwd=project(tmp_path, {}, FIXTURES))
    assert "7 passed, 2 errors" in ran.stdout, ran.stdout + ran.stderr
    assert "streams were left unclosed" in ran.stdout


def test_the_plugin_can_be_switched_off(installed: Run, tmp_path: Path) -> None:
    folder = project(tmp_path, PROJECTS["both"], "def test_it(open_streams):\n    pass\n")
    ran = installed("-m", "pytest", "-p", "no:penstock", cwd=folder)
    assert ran.returncode == 1
    assert "fixture 'open_streams' not found" in ran.stdout
