"""The folders of unix sockets: one for each process, and none of a process that is gone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pipeline.network.tcp.socket_folder import SOCKET_NAME, new_socket_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def bound(folder: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX)
    opened.bind(str(folder / SOCKET_NAME))
    return opened


def test_a_folder_is_for_its_user_only(temporary: Path) -> None:
    folder = new_socket_folder()
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folders_of_processes_that_are_gone_are_removed() -> None:
    gone = new_socket_folder()
    bound(gone).close()
    new_socket_folder()
    assert not gone.exists()


def test_folders_of_others_stay() -> None:
    listening, starting = new_socket_folder(), new_socket_folder()
    with bound(listening) as opened:
        opened.listen(0)
        with socket.socket(socket.AF_UNIX) as caller:  # its queue is full
            caller.setblocking(False)
            caller.connect(str(listening / SOCKET_NAME))
            new_socket_folder()
            new_socket_folder()
    assert os.path.exists(listening)
    assert os.path.exists(starting)
