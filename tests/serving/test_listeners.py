"""Listening sockets that a process inherits, as systemd passes them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import InvalidArgument
from serving.listeners import inherited_sockets, listen
from serving.processes import child_process

ROOT = Path(__file__).parents[2]
SHOWS = """
import os
from serving.listeners import inherited_sockets
with inherited_sockets(os.environ) as found:
    print({name: each.getsockname()[1] for name, each in found.items()})
"""


def inherited(*sockets: tuple[str, socket.socket]) -> str:
    """What a program that inherits the sockets finds."""
    named = ",".join(f"{name}={each.fileno()}" for name, each in sockets)
    command = [sys.executable, "-I", "-S", child_process._BOUND_EXEC, str(os.getpid()), named]
    ran = subprocess.run(
        [*command, sys.executable, "-c", SHOWS],
        pass_fds=[each.fileno() for _, each in sockets],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    return ran.stdout.strip() or ran.stderr.strip().splitlines()[-1]


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@pytest.mark.slow
def test_sockets_are_found_by_their_names() -> None:
    with listen("127.0.0.1", 0) as http, listen("127.0.0.1", 0) as admin:
        found = inherited(("admin", admin), ("http", http))
        assert found == str({"admin": port_of(admin), "http": port_of(http)})
        assert inherited(("penstock.socket", http)) == str({"http": port_of(http)})
        assert "LISTEN_FDNAMES: " not in inherited()


@pytest.mark.slow
def test_what_is_no_listening_socket_is_refused() -> None:
    with socket.socket() as idle, listen("127.0.0.1", 0) as http:
        assert "descriptor 3 is no listening socket" in inherited(("http", idle))
        assert "must name each of http, admin, status once at most, got other" in inherited(
            ("other", http), ("x", idle)
        )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LISTEN_PID": "1", "LISTEN_FDS": "1"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "one"},
        {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"},
    ],
)
def test_sockets_of_another_process_are_left_alone(environment: dict[str, str]) -> None:
    with inherited_sockets(environment) as found:
        assert found == {}


def test_an_unknown_name_among_several_is_refused() -> None:
    variables = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}
    with pytest.raises(InvalidArgument) as refused, inherited_sockets(variables):
        pass
    assert refused.value.field == "LISTEN_FDNAMES"


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
def test_what_is_no_name_of_a_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidArgument, match="is no name of a host") as refused:
        listen(host, 0)
    assert refused.value.field == "host"
