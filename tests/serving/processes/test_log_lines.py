"""LogLines: whose line it is, in text and in JSON; the notices of programs."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest

from serving.processes import LogLines, notify_ready
from serving.processes.notify import ready_status

NAMES = ["worker-1", "up"]


async def test_each_line_has_the_name_of_its_program_in_front() -> None:
    stream = io.StringIO()
    await LogLines(stream, NAMES).write("up", ["one", "two"])
    assert stream.getvalue() == "up       | one\nup       | two\n"


def test_a_colour_ends_before_the_line() -> None:
    lines = LogLines(io.StringIO(), NAMES, is_coloured=True)
    assert lines.formed("up", "text").endswith("up       | \x1b[0mtext")
    assert lines.formed("up", "")[:5] != lines.formed("worker-1", "")[:5]


def test_a_program_cannot_control_the_terminal() -> None:
    assert LogLines(io.StringIO(), NAMES).formed("up", "\x1b[2J") == r"up       | \x1b[2J"


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ('{"message": "m", "level": "INFO"}', {"process": "up", "message": "m", "level": "INFO"}),
        ("{}", {"process": "up"}),
        ("plain {", {"process": "up", "message": "plain {"}),
        ("{not json}", {"process": "up", "message": "{not json}"}),
        ("[1]", {"process": "up", "message": "[1]"}),
        ("[" * 50_000, {"process": "up", "message": "[" * 50_000}),
        ('{"load": NaN}', {"process": "up", "message": '{"load": NaN}'}),
    ],
)
def test_with_json_each_line_is_an_object_with_the_program(line: str, entry: dict[str, str]) -> None:
    assert json.loads(LogLines(io.StringIO(), NAMES, is_json=True).formed("up", line)) == entry


async def test_a_stream_that_is_closed_is_no_error() -> None:
    stream = io.StringIO()
    stream.close()
    await LogLines(stream, NAMES).write("up", ["one"])


def test_a_notice_arrives_with_its_status(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path := str(tmp_path / "n"))
        notify_ready({"NOTIFY_SOCKET": path}, "Serving m\nmore")
        assert ready_status(listener.recv(1000)) == "Serving m"


@pytest.mark.parametrize(
    ("notice", "status"), [(b"READY=1", ""), (b"STATUS=x", None), (b"READY=0", None), (b"\xff\xfe", None)]
)
def test_only_a_notice_of_readiness_counts(notice: bytes, status: str | None) -> None:
    assert ready_status(notice) == status


def test_a_notice_of_half_a_character_arrives_all_the_same(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path := str(tmp_path / "n"))
        notify_ready({"NOTIFY_SOCKET": path}, "Serving \ud800")
        assert ready_status(listener.recv(1000)) == "Serving ?"


def test_a_socket_that_is_not_there_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notify_ready({"NOTIFY_SOCKET": str(tmp_path / "none")}, "Serving m")
    assert "was not notified" in caplog.text
    notify_ready({}, "Serving m")
