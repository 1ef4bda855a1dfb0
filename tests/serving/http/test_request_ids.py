"""Each request has an id: in its answer's headers, its error body, its context, and every message about it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID, uuid4

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send

from engines import SystemHealth
from pipeline import Annotated, Context, InvalidArgument, ResponseStream
from pipeline.protocols import BackendOutput, FinishReason
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait
from serving.http import Availability, HttpOptions, Telemetry, app, status_app
from serving.http.request import RequestHeaders
from serving.log_format import RequestFields
from tests.serving.worlds import chat, complete, request_to

ID, OWN_ID = "x-request-id", "x-penstock-request-id"
ANSWER = [Annotated(BackendOutput([1], ["a"], "a", finish_reason=FinishReason.STOP))]


def engine(*script: Any) -> ScriptedEngine:
    return ScriptedEngine(list(script) or ANSWER)


def is_uuid(text: str) -> bool:
    return str(UUID(text)) == text


class Failing:
    """Availability that breaks: what an error of our own in an endpoint looks like."""

    phase = property(lambda self: 1 / 0)


BROKEN: Any = Failing()


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/nope", None, {}, 404),
        ("GET", "/v1/chat/completions", None, {}, 405),
        ("POST", "/v1/chat/completions", {}, {"content-type": "text/plain"}, 415),
        ("POST", "/v1/chat/completions", b" " * 2**20 + b"{}", {}, 413),
        ("POST", "/v1/chat/completions", b"{", {}, 400),
        ("POST", "/v1/chat/completions", {"model": "m", "messages": []}, {}, 400),
        ("POST", "/v1/chat/completions", {"model": "x", "messages": [{"role": "user", "content": "a"}]}, {}, 404),
        ("GET", "/v1/models/nope", None, {}, 404),
        ("GET", "/v1/models", None, {}, 200),
        ("GET", "/live", None, {}, 200),
        ("GET", "/metrics", None, {}, 200),
        ("POST", "/v1/completions", {"model": "m", "prompt": "a"}, {}, 200),
        ("POST", "/v1/completions", {"model": "m", "prompt": "a", "stream": True}, {}, 200),
    ],
)
async def test_every_answer_has_an_id_and_every_error_body_the_same(
    method: str, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    invalid = ScriptedEngine([Fail(InvalidArgument("no"))]) if path.endswith("chat/completions") else engine()
    service = app({"m": invalid}, options=HttpOptions(body_limit_mb=1))
    sent = {"content-type": "application/json"} | headers
    first, second = [await request_to(service, path, body, method=method, headers=sent).run() for _ in range(2)]
    assert first.status == status
    assert is_uuid(first.response_headers[ID])
    assert first.response_headers[ID] != second.response_headers[ID]
    if status >= 400:
        assert first.json["request_id"] == first.response_headers[ID]


async def test_an_error_of_our_own_has_an_id_too() -> None:
    exchange = request_to(app({"m": engine()}, availability=BROKEN), "/health", method="GET")
    with pytest.raises(ZeroDivisionError):  # the server logs it
        await exchange.run()
    assert (exchange.status, exchange.json["request_id"]) == (500, exchange.response_headers[ID])


async def test_the_status_port_of_a_worker_has_ids_too() -> None:
    service = status_app(SystemHealth(), Telemetry(), {})
    for path in ("/health", "/metrics", "/nope"):
        answer = await request_to(service, path, method="GET").run()
        assert is_uuid(answer.response_headers[ID])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_uuid_of_the_client_is_the_id_and_comes_back_as_it_came(stream: bool) -> None:
    seen: list[str] = []

    class Noting(ScriptedEngine):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            seen.append(request.id)
            return await super().generate(request)

    known = uuid4()
    for header, text in ((ID, str(known).upper()), ("x-dynamo-request-id", str(known))):
        answer = await chat(app({"m": Noting(ANSWER)}), stream=stream, headers={header: text}).run()
        assert answer.response_headers[ID] == (text if header == ID else str(known))
        assert OWN_ID not in answer.response_headers
        refused = await chat(app({"m": engine()}), model="x", headers={header: text}).run()
        assert refused.json["request_id"] == str(known)
    assert seen == [str(known)] * 2


async def test_another_text_comes_back_beside_the_id() -> None:
    answer = await chat(app({"m": engine()}), model="x", headers={ID: "my id/7"}).run()
    assert answer.response_headers[ID] == "my id/7"
    assert is_uuid(answer.response_headers[OWN_ID])
    assert answer.json["request_id"] == answer.response_headers[OWN_ID]


@pytest.mark.parametrize("text", ["a" * 257, "a" * 100_000, "", "a\r\nset-cookie: b", "a\x00b", "é", " a", "a\x7f"])
async def test_a_text_that_is_no_id_is_not_repeated(text: str) -> None:
    answer = await chat(app({"m": engine()}), headers={ID: text}).run()
    assert is_uuid(answer.response_headers[ID])


@given(st.text(max_size=300))
async def test_what_is_repeated_can_be_sent_and_printed(text: str) -> None:
    echo = RequestHeaders({ID: text}).echo
    assert echo is None or (echo == text and re.fullmatch(r"[ -~]{1,256}", echo))


class Seen(logging.Handler):
    """What messages of these tests have of their request."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(RequestFields())
        self.records: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        names = ("request", "client_request", "model", "worker", "trace")
        self.records.append({"message": record.getMessage()} | {n: getattr(record, n, None) for n in names})


@pytest.fixture
def seen() -> Iterator[list[dict[str, Any]]]:
    """The messages of `Talking` so far, with the fields of their requests."""
    handler, logger = Seen(), logging.getLogger("tests.engine")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.records
    logger.removeHandler(handler)


class Talking(ScriptedEngine):
    """Writes messages where a request of its own runs: when it is called, in its stream, and in a thread."""

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        log = logging.getLogger("tests.engine")
        log.info("requested %s", request.id)
        stream = await super().generate(request)

        async def items() -> AsyncIterator[Any]:
            async with stream:
                async for item in stream:
                    log.info("item")
                    await anyio.to_thread.run_sync(log.info, "thread")
                    yield item

        return ResponseStream(items(), request, stream)


async def test_messages_of_requests_that_run_together_name_each_its_own(seen: list[dict[str, Any]]) -> None:
    service = app({"m": Talking([Wait(1), *ANSWER])})
    ids = [str(uuid4()) for _ in range(3)]
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    async with anyio.create_task_group() as tasks:
        for number, each in enumerate(ids):
            tasks.start_soon(chat(service, stream=bool(number), headers=trace | {ID: each}).run)
    for each in ids:
        of_it = [record for record in seen if record["request"] == each]
        assert {record["message"] for record in of_it} == {f"requested {each}", "item", "thread"}
        assert {(record["model"], record["trace"]) for record in of_it} == {("m", "a" * 32)}
    logging.getLogger("tests.engine").info("outside")
    assert seen[-1] == {"message": "outside", "request": None, "client_request": None} | dict.fromkeys(
        ("model", "worker", "trace")
    )


async def test_messages_of_a_list_of_prompts_name_the_prompt(seen: list[dict[str, Any]]) -> None:
    answer = await complete(app({"m": Talking(ANSWER)}), prompt=["a", "b"]).run()
    request_id = answer.response_headers[ID]
    requested = [record for record in seen if record["message"].startswith("requested")]
    assert {record["request"] for record in requested} == {f"{request_id}-0", f"{request_id}-1"}
    assert all(record["message"] == f"requested {record['request']}" for record in requested)


async def test_a_client_that_leaves_before_its_answer_has_its_id_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    options = HttpOptions(access_log=True)
    exchange = chat(app({"m": ScriptedEngine([Stall()])}, options=options, availability=Availability()), stream=True)
    with caplog.at_level(logging.INFO, "serving.access"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await anyio.sleep(1)
            exchange.leave()
    (record,) = [record for record in caplog.records if record.name == "serving.access"]
    assert vars(record)["fields"]["status"] == 499


class _Broken:
    """A middleware that fails, before or after the answer has begun."""

    def __init__(self, app: ASGIApp, begins: bool) -> None:
        self._begins = begins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("broken")


@pytest.mark.parametrize(("begins", "statuses"), [(False, [500]), (True, [200])])
async def test_the_edge_answers_where_a_middleware_fails_and_the_server_gets_the_error(
    begins: bool, statuses: list[int]
) -> None:
    service, sent = app({"m": ScriptedEngine([])}), list[Any]()
    service.add_middleware(_Broken, begins=begins)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/live", "headers": [], "client": None}
    with pytest.raises(ValueError, match="broken"):
        await service(scope, receive, send)
    assert [message["status"] for message in sent if "status" in message] == statuses
    assert b"x-request-id" in dict(sent[0]["headers"])
    if not begins:
        assert json.loads(sent[1]["body"])["request_id"] == dict(sent[0]["headers"])[b"x-request-id"].decode()
