"""The errors of servers as errors of the tree, whatever form their messages have."""

from __future__ import annotations

from typing import Any

import pytest

from engines.upstream import of_frame, of_status
from engines.upstream.errors import excerpt, of_one_server
from pipeline import InvalidArgument, PenstockError
from pipeline.errors import (
    BackendCannotConnect,
    BackendResponseTimeout,
    BackendUnknown,
    EngineShutdown,
    ResourceExhausted,
    StatusError,
    Unavailable,
    WorkerOverloaded,
)

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *[(400, InvalidArgument), (422, InvalidArgument), (429, ResourceExhausted), (529, ResourceExhausted)],
        *[(503, Unavailable), (502, BackendCannotConnect), (504, BackendResponseTimeout), (500, BackendUnknown)],
        *[(301, StatusError), (401, StatusError), (404, StatusError), (413, StatusError), (505, BackendUnknown)],
    ],
)
def test_a_status_has_one_error(status: int, kind: type[PenstockError]) -> None:
    error = of_status(status, b"")
    assert (type(error), error.message) == (kind, f"HTTP {status}: no message")
    assert type(of_frame({"code": status, "message": "m"}, has_tokens=False)) is (
        kind if status >= 400 else BackendUnknown
    )
    assert type(of_frame({"code": status, "message": "m"}, has_tokens=True)) is BackendUnknown, "nothing was refused"


@pytest.mark.parametrize(
    "body",
    [
        b"so  it\nis",
        b'{"message": "so it is"}',
        b'{"detail": "so it is"}',
        b'{"error": "so it is"}',
        b'{"error": {"message": "so it is", "code": 400}}',
        b'{"error": {"error": {"message": "so it is"}}}',
        b'{"object": "error", "message": "so it is"}',
    ],
)
def test_the_message_is_found_in_every_usual_form(body: bytes) -> None:
    assert of_status(404, body).message == "HTTP 404: so it is"


@pytest.mark.parametrize("body", [b"x" * 2**20, b'{"message": "' + b"x" * 2**20 + b'"}', b"\xff" * 2**20])
def test_of_a_message_as_much_is_kept_as_a_log_needs(body: bytes) -> None:
    assert len(of_status(500, body).message) < 320
    assert len(of_frame({"message": "x" * 2**20}, has_tokens=False).message) <= 300
    assert len(excerpt(body)) < 400


@pytest.mark.parametrize(
    "frame", [None, 5, "", [], {}, {"code": "400"}, {"code": 99}, {"code": True}, {"message": None}]
)
def test_an_error_event_of_any_form_is_a_failure(frame: Any) -> None:
    error = of_frame(frame, has_tokens=False)
    assert type(error) is BackendUnknown
    assert error.message


def test_an_engine_that_has_ended_is_known_by_its_message() -> None:
    assert type(of_status(500, DEAD.encode())) is EngineShutdown
    assert type(of_frame({"message": DEAD, "code": 500}, has_tokens=True)) is EngineShutdown


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, WorkerOverloaded), (529, WorkerOverloaded), (503, WorkerOverloaded), (400, InvalidArgument)],
)
def test_what_one_server_refuses_as_too_busy_another_may_take(status: int, kind: type[PenstockError]) -> None:
    error = of_one_server(of_status(status, b"busy"))
    assert (type(error), error.message) == (kind, f"HTTP {status}: busy")
