"""The image: its Dockerfile by the rules of hadolint, what it copies, and its health check against real servers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.worlds import DEPLOY
from tests.serving.worlds import program

ROOT = DEPLOY.parent
DOCKERFILE = DEPLOY / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def linted(path: Path) -> subprocess.CompletedProcess[str]:
    hadolint = Path(sys.executable).parent / "hadolint"
    return subprocess.run([hadolint, path], capture_output=True, text=True, check=False, timeout=60)


def healthy(**environment: str) -> int:
    """Return the exit code of the health check with these variables."""
    check = [sys.executable, str(DEPLOY / "health_check.py")]
    return subprocess.run(check, env=environment, capture_output=True, check=False, timeout=30).returncode


def test_the_dockerfile_holds_the_rules_of_hadolint(tmp_path: Path) -> None:
    done = linted(DOCKERFILE)
    assert (done.returncode, done.stdout) == (0, "")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM python\nRUN cd /tmp && pip install attrs\n", encoding="utf-8")
    assert "DL3006" in linted(wrong).stdout


def test_the_image_has_every_package_of_the_wheel_and_only_extras_that_exist() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert {*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"], "constraints.txt"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", text, re.MULTILINE)
    assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_image_runs_as_another_user_than_root() -> None:
    *_, last_stage = DOCKERFILE.read_text(encoding="utf-8").split("FROM ")
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last_stage, re.MULTILINE)


def test_the_health_check_fails_without_a_server() -> None:
    assert healthy(PENSTOCK_PORT="1") == 1


@pytest.mark.slow
def test_the_health_check_follows_the_server() -> None:
    with program() as (process, address):
        port = address.rpartition(":")[2]
        assert healthy(PENSTOCK_PORT=port) == 0
        assert healthy(DYN_SYSTEM_PORT=port, PENSTOCK_PORT="1") == 0
        assert healthy(DYN_SYSTEM_PORT="-1", PENSTOCK_PORT=port) == 0
        process.kill()
        process.wait(timeout=10)
        assert healthy(PENSTOCK_PORT=port) == 1
