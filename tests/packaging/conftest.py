"""The wheel as people install it, and environments with it in them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = str(ROOT / "constraints.txt")


Run = Callable[..., subprocess.CompletedProcess[str]]


def runner(folder: Path) -> Run:
    """What runs the Python of a virtual environment: `run(*arguments, cwd=folder)`, with nothing of ours around it."""

    def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [folder / "bin" / "python", *arguments],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "COLUMNS": "300", **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def environment(folder: Path, *install: str) -> Path:
    """The folder as a virtual environment in which pip has installed what the arguments name."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", *install]
    done = subprocess.run(pip, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the Python of an environment with the wheel, what it depends on, and no extra; needs the package index."""
    return runner(environment(tmp_path_factory.mktemp("bare"), str(wheel), "-c", CONSTRAINTS))


@pytest.fixture(scope="session")
def bare_with_test_tools(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same with the libraries that the tests of the core themselves use."""
    tools = ("pytest", "pytest-timeout", "hypothesis", "trio")
    return runner(environment(tmp_path_factory.mktemp("bare_tools"), str(wheel), *tools, "-c", CONSTRAINTS))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the Python of an environment with the wheel in it, which borrows all else from the one of this run."""
    folder = environment(tmp_path_factory.mktemp("installed"), "--no-deps", "--no-index", str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names is searched, but the .pth files in it are not read: the editable installation of
    # this checkout stays out.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return runner(folder)
