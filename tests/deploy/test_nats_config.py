"""The configuration of NATS: the server itself reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.deploy.worlds import KUBERNETES

CONFIG = KUBERNETES / "base" / "nats.conf"


def checked(path: Path) -> int:
    """Return the exit code of a server that only reads the file."""
    server = Path(sys.executable).parent / "nats-server"
    environment = {"NATS_NAME": "nats-0", "NATS_TOKEN": "secret"}
    command = [str(server), "-t", "-c", str(path)]
    return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=30).returncode


def test_the_server_takes_its_configuration(tmp_path: Path) -> None:
    assert checked(CONFIG) == 0
    wrong = tmp_path / "nats.conf"
    wrong.write_text(CONFIG.read_text(encoding="utf-8").replace("store_dir", "stored_in"), encoding="utf-8")
    assert checked(wrong) == 1
