"""Messages as text and as JSON: one line each, which no text can forge, without credentials; and the access log."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocols import FinishReason
from pipeline.testing import ScriptedEngine, Wait
from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import HttpOptions, app
from serving.log_format import (
    FIELDS,
    JsonLines,
    RequestFields,
    TextLines,
    current_fields,
    log_to_stderr,
    with_fields,
)
from tests.serving.worlds import chat, last, program, request_to, token

Lines = Callable[[], list[dict[str, Any]]]

DOCS = Path(__file__).parents[2] / "docs" / "observability.md"
HOSTILE = st.text(
    st.sampled_from("\n\r\x00\x1b\x85\u2028\u2029\x7f\ud800\u202e") | st.characters() | st.sampled_from("ERROR x:"),
    max_size=60,
)


def record(message: str = "m", level: str = "INFO", **attributes: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "n", "levelname": level, "msg": message} | attributes)


def failure(text: str) -> Any:
    try:
        raise ValueError(text)
    except ValueError:
        return sys.exc_info()


def json_of(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines().format(made)
    assert line.isascii()
    assert line.isprintable()
    read: dict[str, Any] = json.loads(line)
    return read


def test_a_json_line_has_the_fields_that_the_docs_list() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Messages")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)) == FIELDS


def test_a_json_line_has_time_level_logger_and_message() -> None:
    line = json_of(record("a %d", args=(7,), created=0.5))
    assert line == {"time": "1970-01-01T00:00:00.500Z", "level": "INFO", "logger": "n", "message": "a 7"}


def test_the_error_of_a_json_line_is_a_field_with_its_stack() -> None:
    error = json_of(record(exc_info=failure("a\nb")))["error"]
    assert (error["type"], error["message"]) == ("ValueError", "a\nb")
    assert error["stack"].startswith("Traceback")
    assert "in failure" in error["stack"]


@given(HOSTILE, HOSTILE, HOSTILE)
def test_a_json_line_is_one_line_with_any_content(message: str, client: str, error: str) -> None:
    line = json_of(record(message, exc_info=failure(error), client_request=client))
    assert line.keys() <= FIELDS.keys()


@given(HOSTILE, HOSTILE, HOSTILE)
def test_no_text_begins_a_line_that_looks_like_a_message(message: str, client: str, error: str) -> None:
    text = TextLines().format(record(message, exc_info=failure(error), client_request=client, request="r"))
    first, *others = text.split("\n")
    assert first.startswith("INFO n: ")
    assert not [line for line in others if re.match(r"(?:[A-Z]+|Level \d+) \S*:", line)]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e\ud800-\udfff]", text.replace("\t", ""))


def test_a_text_line_has_the_fields_of_its_request_behind_it() -> None:
    made = record(request="r", model="a b", worker="1f", trace="")
    assert TextLines().format(made) == 'INFO n: m [request=r model="a b" worker=1f]'
    assert TextLines().format(record()) == "INFO n: m"


@pytest.mark.parametrize(
    "secret",
    [
        "Authorization: Bearer sk-0123456789abcdef",
        "{'authorization': 'Bearer sk-0123456789abcdef'}",
        "GET /v1?api_key=sk-0123456789abcdef failed",
        "x-api-key: sk-0123456789abcdef",
        "password=sk-0123456789abcdef",
    ],
)
def test_credentials_are_in_no_form(secret: str) -> None:
    made = record(secret, exc_info=failure(secret))
    for form in (JsonLines(), TextLines()):
        assert "0123456789" not in form.format(made)
        assert "***" in form.format(made)


def test_a_field_that_is_not_in_the_table_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no field"):
        with_fields(secret="x")


def test_a_message_never_fails_for_what_is_beside_it() -> None:
    token = current_fields.set(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    try:
        assert RequestFields().filter(record())
    finally:
        current_fields.reset(token)


def test_long_texts_of_clients_are_cut() -> None:
    made = record(model="m" * 10_000)
    assert len(json_of(made)["model"]) == 512
    assert len(TextLines().format(made)) < 600


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger without handlers; it and that of the access log are restored afterwards."""
    loggers = [logging.getLogger(name) for name in ("", "serving.access")]
    before = [(logger.handlers[:], logger.level) for logger in loggers]
    loggers[0].handlers.clear()
    yield loggers[0]
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level = handlers, level


@pytest.mark.parametrize("access_log", [True, False])
@pytest.mark.parametrize("level", ["DEBUG", "ERROR"])
def test_the_access_log_is_written_at_any_level_and_only_if_it_is_on(
    root: logging.Logger, level: str, access_log: bool
) -> None:
    log_to_stderr(level, access_log=access_log)
    assert logging.getLogger("serving.access").isEnabledFor(logging.INFO) is access_log
    assert logging.getLogger("uvicorn.error").getEffectiveLevel() == root.level


# -- the access log


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Return the fields of the access log's messages so far."""
    caplog.set_level(logging.INFO, "serving.access")
    caplog.handler.addFilter(RequestFields())
    return lambda: [json_of(record) for record in caplog.records if record.name == "serving.access"]


ACCESS = HttpOptions(access_log=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_one_line_when_its_answer_has_ended(lines: Lines, stream: bool) -> None:
    engine = ScriptedEngine([Wait(2), token("a"), Wait(1), token("b"), last(FinishReason.LENGTH), Wait(1)])
    exchange = chat(app({"m": engine}, options=ACCESS), stream=stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(2.5)
        assert lines() == []
    (line,) = lines()
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line.pop("request") == exchange.response_headers["x-request-id"]
    assert line.pop("message").startswith("POST /v1/chat/completions 200 duration_ms=")
    assert line == {
        "level": "INFO",
        "logger": "serving.access",
        "model": "m",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "duration_ms": 4000.0,
        "first_token_ms": 2000.0,
        "tokens_in": 5,
        "tokens_out": 2,
        "finish_reason": "length",
        "caller": "127.0.0.1",
    }


async def test_pages_and_refusals_are_in_the_access_log_without_their_queries(lines: Lines) -> None:
    service = app({"m": ScriptedEngine([])}, options=ACCESS)
    for path in ("/live", "/nope\nERROR x: forged caller=1"):
        await request_to(service, path, method="GET").run()
    assert [(line["path"], line["status"]) for line in lines()] == [
        ("/live", 200),
        ("/nope\nERROR x: forged caller=1", 404),
    ]
    assert lines()[1]["message"].startswith("GET /nope%0AERROR%20x%3A%20forged%20caller%3D1 404 ")


async def test_without_the_option_nothing_is_written(lines: Lines) -> None:
    await request_to(app({"m": ScriptedEngine([])}), "/live", method="GET").run()
    assert lines() == []


async def test_the_access_log_names_the_worker(lines: Lines) -> None:
    async with hosted_graph(GraphConfig(workers=2, model_name="m"), HostOptions()) as opened:
        await chat(app(opened.graph, options=ACCESS)).run()
        assert lines()[0]["worker"] in [f"{worker.worker_id:x}" for worker in opened.workers]


def test_a_program_writes_every_line_as_json(tmp_path: Path) -> None:
    """Also those of the server library, whose own access log stays silent."""
    with program("--log-format", "json", "--log-level", "info", "--access-log") as (process, address):
        connection = HTTPConnection(address)
        connection.request("GET", "/live?api_key=sk-0123456789", headers={"x-request-id": "mine"})
        assert connection.getresponse().read()
        connection.close()
        process.terminate()
        _, errors = process.communicate(timeout=20)
    lines = [json.loads(line) for line in errors.splitlines()]
    (access,) = [line for line in lines if line["logger"] == "serving.access"]
    assert (access["path"], access["client_request"]) == ("/live", "mine")
    assert [line for line in lines if line["logger"] == "uvicorn.error"]
    assert not [line for line in lines if line["logger"] == "uvicorn.access"]
    assert "0123456789" not in errors
