"""A server at the limit of open files: it is logged, once, and it recovers."""

from __future__ import annotations

import errno
import http.client
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from typing import Any

import pytest

from serving.open_files import OpenFiles

LIMITED = """
import importlib.util, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == sys.argv[1] else find(name, *package)
sys.argv = ["penstock", "serve", "--port", "0"]
from serving.__main__ import main
main()
"""
FULL = "no new connections are taken: this process has as many files open as it may, 64 (`ulimit -n` raises that)"


def health(address: tuple[str, int]) -> int:
    """The status of the health page, 0 without an answer."""
    with closing(http.client.HTTPConnection(*address, timeout=1)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0


@pytest.mark.parametrize("without", ["nothing", "uvloop"])
def test_a_server_at_its_limit_logs_one_line_and_recovers(without: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LIMITED, without], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            address = ("127.0.0.1", int(process.stdout.readline().rpartition(":")[2]))
            with ExitStack() as connections:
                for _ in range(100):
                    connections.enter_context(socket.create_connection(address))
                assert process.stderr.readline() == f"ERROR serving.open_files: {FULL}\n"
                assert health(address) == 0
            until_s = time.monotonic() + 20
            while (status := health(address)) != 200 and time.monotonic() < until_s:
                time.sleep(0.1)
            assert status == 200
            assert process.stderr.readline() == "WARNING serving.open_files: new connections are taken again\n"
            process.terminate()
            _, errors = process.communicate(timeout=10)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The error of every new file, while there is one."""
    errors: list[int] = []
    dup = os.dup

    def limited(file: int) -> int:
        if errors:
            raise OSError(errors[0], "no file")
        return dup(file)

    monkeypatch.setattr(os, "dup", limited)
    return errors


def test_it_is_logged_again_after_a_minute_only(full: list[int], caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    with socket.socket() as listener:
        files = OpenFiles(listener.fileno(), clock)
        files.check()
        assert caplog.messages == []
        full.append(errno.EMFILE)
        for clock.now_s in (1.0, 30.0, 60.0, 61.0, 62.0):
            files.check()
        assert [message[:20] for message in caplog.messages] == ["no new connections a"] * 2
        full.clear()
        files.check()
        files.check()
        full.append(errno.EMFILE)
        files.check()
    assert caplog.messages[2:] == ["new connections are taken again"]


def test_the_limit_of_the_system_is_another_one(full: list[int], caplog: pytest.LogCaptureFixture) -> None:
    full.append(errno.ENFILE)
    with socket.socket() as listener:
        OpenFiles(listener.fileno(), Clock()).check()
    assert caplog.messages == ["no new connections are taken: the system has as many files open as it can"]


@pytest.mark.parametrize(
    ("context", "is_taken"),
    [
        ({"exception": OSError(errno.EMFILE, "x"), "socket": None}, True),
        ({"exception": OSError(errno.EMFILE, "x")}, False),
        ({"exception": OSError(errno.EBADF, "x"), "socket": None}, False),
        ({"exception": ValueError(), "socket": None}, False),
        ({}, False),
    ],
)
def test_other_exceptions_of_the_loop_go_where_they_went(context: dict[str, Any], is_taken: bool) -> None:
    seen: list[Any] = []
    OpenFiles(0, Clock()).handler(lambda _, context: seen.append(context))(None, context)
    assert seen == ([] if is_taken else [context])
