"""The folder of a process's unix socket, and those that killed processes have left behind."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp

PREFIX = "penstock-requests-"
SOCKET_NAME = "requests.sock"


def new_socket_folder() -> Path:
    """Return a new folder that only this user can read, and remove those of this user whose process is gone."""
    for folder in _left_behind():
        shutil.rmtree(folder, ignore_errors=True)
    return Path(mkdtemp(prefix=PREFIX))


def _left_behind() -> Iterator[Path]:
    for path in Path(gettempdir()).glob(f"{PREFIX}*/{SOCKET_NAME}"):
        with suppress(OSError):  # it is another user's, or has just been removed
            if path.stat().st_uid == os.getuid() and _refuses(path):
                yield path.parent


def _refuses(path: Path) -> bool:
    """Return whether no process listens at the socket. One that hangs, or has too many callers, does."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
