"""What clients get when something is wrong, before, at and after the first item."""

from __future__ import annotations

from typing import Any

import pytest

from operators import AllBusy, AllCoolingDown, Model, Preprocess
from operators.text import WHOLE_CHAT
from pipeline import (
    Annotated,
    Cancelled,
    Disconnected,
    InvalidArgument,
    PenstockError,
    ResourceExhausted,
    StreamIncomplete,
    Unavailable,
)
from pipeline.errors import StatusError, chain
from pipeline.protocols import BackendOutput, FinishReason
from pipeline.testing import Fail, ScriptedEngine, Wait, watch_streams
from serving.http import HttpOptions, app
from tests.serving.worlds import chat, complete, last, request_to, token

SECRET = "/etc/secret: KeyError at 0x7f"
ANNOTATION = Annotated[Any].from_annotation("token_ids", [1])
INTERNAL = {"message": "Internal server error", "type": "Internal Server Error", "code": 500}


WRECKS = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException(SECRET)]


def error_of(answer: Any) -> dict[str, Any]:
    """The body of an error without the id of the request, which is that of the answer's header."""
    body: dict[str, Any] = answer.json
    assert body.pop("request_id") == answer.response_headers["x-request-id"]
    return body


def early(error: BaseException) -> list[tuple[str, ScriptedEngine]]:
    """Engines that fail with the error at each place before their first item."""
    return [
        ("generate raises", ScriptedEngine([], fails=error)),
        ("the first read raises", ScriptedEngine([Fail(error)])),
        ("the first item is an error", ScriptedEngine([Annotated[Any].from_error(error)])),
        ("it comes after annotations", ScriptedEngine([*[ANNOTATION] * 16, Annotated[Any].from_error(error)])),
        ("it comes late", ScriptedEngine([Wait(3), Fail(error)])),
    ]


@pytest.mark.parametrize("place", range(5), ids=[name for name, _ in early(ValueError())])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidArgument("unsupported JSON schema keyword"), 400, "unsupported JSON schema keyword"),
        (Unavailable(SECRET), 503, "Service temporarily unavailable"),
        (ResourceExhausted(SECRET), 529, "Service temporarily overloaded"),
        (Cancelled(SECRET), 499, "Request cancelled"),
        (StatusError("no such adapter", status=404), 404, "no such adapter"),
        (Disconnected(SECRET), 500, "Internal server error"),
        (RuntimeError(SECRET), 500, "Internal server error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_an_error_before_the_first_item_is_a_status(
    place: int, stream: bool, error: Exception, status: int, message: str
) -> None:
    _, engine = early(error)[place]
    with watch_streams() as streams:
        answer = await chat(app({"m": engine}), stream=stream).run()
    assert (answer.status, answer.json["code"], answer.json["message"]) == (status, status, message)
    assert set(error_of(answer)) == {"message", "type", "code"}
    assert streams.open == []
    assert engine.open == 0


async def test_after_many_annotations_the_answer_has_begun() -> None:
    engine = ScriptedEngine([*[ANNOTATION] * 17, Wait(1), Fail(InvalidArgument("late"))])
    answer = await chat(app({"m": engine}), stream=True).run()
    assert answer.status == 200
    assert answer.chunks[-1] == {"error": {"message": "late", "type": "bad_request", "code": 400}}


@pytest.mark.parametrize(
    "failing",
    [
        [Fail(RuntimeError(SECRET))],
        [Annotated[Any].from_error(Disconnected(SECRET))],
        [Annotated(BackendOutput([], [], None, finish_reason=FinishReason.error(SECRET)))],
        [Annotated[Any](None, None, "error", [SECRET], None)],
    ],
    ids=["raise", "error item", "finish reason", "comment only"],
)
async def test_an_error_in_the_middle_is_one_frame_and_done(failing: list[Any]) -> None:
    engine = ScriptedEngine([token("a"), Wait(1), *failing, token("never")])
    answer = await chat(app({"m": engine}), stream=True).run()
    assert answer.status == 200
    assert answer.text == "a"
    error = {"error": {"message": "Internal server error", "type": "internal_server_error", "code": 500}}
    assert [chunk for chunk in answer.chunks if "error" in chunk] == [error]
    assert answer.chunks[-1] == error
    assert SECRET.encode() not in answer.content
    assert engine.open == 0


async def test_an_error_in_the_middle_of_a_whole_answer_is_a_status() -> None:
    engine = ScriptedEngine([token("a"), Fail(RuntimeError(SECRET))])
    answer = await chat(app({"m": engine})).run()
    assert (answer.status, error_of(answer)) == (500, INTERNAL)


async def test_an_error_item_may_name_its_status_in_its_comment() -> None:
    cases = [('{"code": 499}', 499, "Request cancelled"), ('{"code": 422, "message": "x"}', 422, "x"), ("y", 500, None)]
    for comment, status, message in cases:
        engine = ScriptedEngine([Annotated[Any](None, None, "error", [comment], None)])
        answer = await chat(app({"m": engine})).run()
        assert (answer.status, answer.json["message"]) == (status, message or "Internal server error")


async def test_an_error_of_any_prompt_of_a_batch_is_a_status() -> None:

    def script(request: Any) -> list[Any]:
        if request.prompt == "bad":
            return [Wait(1), Annotated[Any].from_error(InvalidArgument("invalid second prompt"))]
        return [token("a"), Wait(60), last()]

    for stream in (True, False):
        engine = ScriptedEngine(script)
        answer = await complete(app({"m": engine}), prompt=["good", "bad"], stream=stream).run()
        assert (answer.status, answer.json["message"]) == (400, "invalid second prompt")
        assert engine.open == 0


def caused(cause: Exception) -> PenstockError:
    """An error whose cause alone has a status for the client."""
    error = PenstockError("the attempt failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [["bad"], ["bad", "good"], ["good", "bad", "good"]], ids=len)
@pytest.mark.parametrize(
    ("error", "status", "type", "retry_after"),
    [
        (caused(Unavailable(SECRET)), 503, "Service Unavailable", None),
        (caused(InvalidArgument("wrong")), 400, "Bad Request", None),
        (caused(AllBusy(SECRET, retry_after_s=3.0)), 529, "Overloaded", "3"),
        (caused(caused(AllCoolingDown(SECRET, retry_after_s=0.5))), 503, "Service Unavailable", "1"),
    ],
    ids=lambda value: type(value.__cause__).__name__ if isinstance(value, Exception) else "",
)
async def test_an_error_means_the_same_in_a_batch_as_alone(
    prompts: list[str], stream: bool, error: PenstockError, status: int, type: str, retry_after: str | None
) -> None:
    """The causes of an error were lost in a batch."""
    causes = list(chain(error))

    def script(request: Any) -> list[Any]:
        return [Wait(1), Fail(error)] if request.prompt == "bad" else [Wait(60), token("a"), last()]

    engine = ScriptedEngine(script)
    answer = await complete(app({"m": engine}), prompt=prompts, stream=stream).run()
    assert (answer.status, answer.json["type"]) == (status, type)
    assert answer.response_headers.get("retry-after") == retry_after
    assert list(chain(error)) == causes
    assert engine.open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stream_without_an_item_is_no_answer(stream: bool) -> None:
    answer = await chat(app({"m": ScriptedEngine([])}), stream=stream).run()
    assert (answer.status, error_of(answer)) == (500, INTERNAL)


async def test_the_status_of_overload_can_be_chosen() -> None:
    engine = ScriptedEngine([], fails=ResourceExhausted(SECRET))
    answer = await chat(app({"m": engine}, options=HttpOptions(overload_status=503))).run()
    assert (answer.status, answer.json["message"]) == (503, "Service temporarily overloaded")
    assert answer.json["type"] == "Overloaded"


async def test_an_unknown_model_is_not_found() -> None:
    answer = await chat(app({"m": ScriptedEngine([])}), model="bar").run()
    assert (answer.status, error_of(answer)) == (404, {"message": "Model not found", "type": "Not Found", "code": 404})


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", "invalid JSON"),
        (b"{", "invalid JSON"),
        (b"[]", "expected an object"),
        (b"{}", "model"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": [{"role": "user", "content": 7}]}', "messages[0].content"),
        (b'{"model": "m", "messages": [], "max_tokens": true}', "max_tokens"),
        (b'{"model": "m", "messages": [], "nvext": {"unheard_of": 1}}', "nvext.unheard_of"),
    ],
)
async def test_a_body_that_is_no_request_is_refused_with_the_place(body: bytes, place: str) -> None:
    answer = await request_to(app({"m": ScriptedEngine([])}), "/v1/chat/completions", body).run()
    assert answer.status == 400
    assert place in answer.json["message"]


async def test_json_that_is_nearly_right_is_repaired() -> None:
    engine = ScriptedEngine([token("a"), last()])
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a\nb\t\xff \\"c"}]}'
    answer = await request_to(app({"m": engine}), "/v1/chat/completions", body).run()
    assert answer.status == 200
    assert engine.requests[0].payload.messages[0].content == 'a\nb\t\ufffd "c'


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 415),
        ("text/plain", 415),
        ("application/jsonp", 415),
        ("application/json", 404),
        ("application/json; charset=utf-8", 404),
        ("Application/vnd.api+JSON", 404),
    ],
)
async def test_the_content_type_of_the_body_must_be_json(content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    body = {"model": "unknown", "messages": [{"role": "user", "content": "x"}]}
    answer = await request_to(app({"m": ScriptedEngine([])}), "/v1/chat/completions", body, headers=headers).run()
    assert answer.status == status


@pytest.mark.parametrize("announced", [True, False])
async def test_a_long_body_is_refused(announced: bool) -> None:
    headers = {"content-type": "application/json"} | ({"content-length": str(2**21)} if announced else {})
    body = b"" if announced else b" " * 2**21
    small = app({"m": ScriptedEngine([])}, options=HttpOptions(body_limit_mb=1))
    answer = await request_to(small, "/v1/completions", body, headers=headers).run()
    assert answer.status == 413
    assert "limit of 1 MB" in answer.json["message"]


@pytest.mark.parametrize("length", ["²", "-1", "9" * 5000, "x"])
async def test_an_announced_length_that_is_not_a_number_is_ignored(length: str) -> None:
    headers = {"content-type": "application/json", "content-length": length}
    answer = await request_to(app({"m": ScriptedEngine([])}), "/v1/completions", b"", headers=headers).run()
    assert answer.status == 400


@pytest.mark.parametrize(
    ("prompt", "place"), [(["a", ""], "Prompt[1]"), ([[]], "Prompt[0]"), ([""], "Prompt[0]"), ([], "Prompt array")]
)
async def test_an_empty_prompt_is_named_by_its_place_in_the_list(prompt: Any, place: str) -> None:
    """Also in a list of one."""
    graph = Preprocess(Model.byte_level("m")) >> ScriptedEngine([])
    answer = await complete(app({"m": graph}), prompt=prompt).run()
    assert (answer.status, answer.json["message"]) == (400, f"Validation: {place} cannot be empty")


@pytest.mark.parametrize("count", [64, 65])
async def test_too_much_metadata_is_refused(count: int) -> None:
    headers = {f"x-dynamo-meta-{number}": "v" for number in range(count)}
    answer = await chat(app({"m": ScriptedEngine([token("a"), last()])}), headers=headers).run()
    assert answer.status == (200 if count == 64 else 431)


async def test_deprecated_function_fields_are_not_implemented() -> None:
    for field in ("functions", "function_call"):
        fields: dict[str, Any] = {field: []}
        answer = await chat(app({"m": ScriptedEngine([])}), **fields).run()
        assert answer.status == 501
        assert field in answer.json["message"]


async def test_unknown_routes_and_wrong_methods_get_their_own_errors() -> None:
    service = app({"m": ScriptedEngine([])})
    unknown = await request_to(service, "/v1/responses/resp_missing", method="GET").run()
    assert (unknown.status, unknown.json["message"]) == (404, "Route not found: GET /v1/responses/resp_missing")
    wrong = await request_to(service, "/v1/completions", method="GET").run()
    assert (wrong.status, wrong.response_headers["allow"], wrong.json["code"]) == (405, "POST", 405)


async def test_errors_repeat_the_clients_request_id_too() -> None:
    service, headers = app({"m": ScriptedEngine([])}), {"x-request-id": "r"}
    for exchange in (
        chat(service, model="bar", headers=headers),
        request_to(service, "/nope", headers=headers),
        request_to(service, "/v1/models/nope", method="GET", headers=headers),
        request_to(service, "/v1/completions", b"", headers=headers),
    ):
        answer = await exchange.run()
        assert answer.status >= 400
        assert answer.response_headers["x-request-id"] == "r"


async def test_a_short_end_is_no_error_unless_the_request_was_stopped() -> None:
    engine = ScriptedEngine([token("a")])
    assert "error" not in (await chat(app({"m": engine}), stream=True).run()).chunks[-1]


async def test_a_broken_worker_is_not_a_short_answer() -> None:
    for error in (StreamIncomplete(SECRET), Disconnected(SECRET)):
        engine = ScriptedEngine([token("a"), Wait(1), Fail(error)])
        answer = await chat(app({"m": engine}), stream=True).run()
        assert answer.chunks[-1]["error"]["code"] == 500


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("api", "fields", "field"),
    [
        (
            "chat",
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            "tool_choice",
        ),
        ("complete", {"best_of": 2}, "best_of"),
        ("complete", {"suffix": "x", "prompt": ["a", "b"]}, "suffix"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    api: str, fields: dict[str, Any], field: str, stream: bool
) -> None:
    graph = Preprocess(Model.byte_level("m")) >> ScriptedEngine([])
    post = {"chat": chat, "complete": complete}[api]
    answer = await post(app({"m": graph}), stream=stream, **fields).run()
    assert answer.status == 400
    assert field in answer.json["message"].lower()


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException(SECRET)], ids=repr
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("place", range(5), ids=[name for name, _ in early(ValueError())])
async def test_any_error_before_the_first_item_is_a_status(place: int, stream: bool, error: BaseException) -> None:
    """Of a graph whose stages translate nothing."""
    _, engine = early(error)[place]
    with watch_streams() as streams:
        exchange = await chat(app({"m": engine}), stream=stream).run()
    assert (exchange.status, error_of(exchange)) == (500, INTERNAL)
    assert not streams.open
    assert engine.open == 0


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException(SECRET)], ids=repr
)
async def test_any_error_in_the_middle_is_an_error_frame(error: BaseException) -> None:
    engine = ScriptedEngine([token("a"), Wait(1), Fail(error)])
    exchange = await chat(app({"m": engine}), stream=True).run()
    *_, last_chunk = exchange.chunks
    assert exchange.status == 200
    assert last_chunk == {"error": {"message": "Internal server error", "type": "internal_server_error", "code": 500}}
    assert engine.open == 0


async def test_any_error_of_one_prompt_of_many_is_a_status() -> None:
    """A task of its own would end the loop."""
    engine = ScriptedEngine(lambda request: [Fail(SystemExit(3))] if request.prompt == "b" else [token("a"), last()])
    exchange = await complete(app({"m": engine}), prompt=["a", "b"]).run()
    assert (exchange.status, error_of(exchange)) == (500, INTERNAL)
    assert engine.open == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", [[1, 2, 999_999], [[1], [2, 3, 999_999]]])
async def test_an_unknown_token_id_is_named_with_its_index(prompt: Any, stream: bool) -> None:
    """It was 500."""
    graph = Preprocess(Model.byte_level("m")) >> ScriptedEngine([Wait(1), token("a"), last()])
    answer = await complete(app({"m": graph}), stream=stream, prompt=prompt).run()
    assert (answer.status, answer.json["message"]) == (400, "prompt: 999999 at index 2 is no token id of model m")


async def test_a_name_of_the_chat_template_cannot_be_replaced() -> None:
    """It was 500."""
    graph = Preprocess(Model.byte_level("m", chat_template=WHOLE_CHAT)) >> ScriptedEngine([])
    answer = await chat(app({"m": graph}), chat_template_args={"namespace": 1}).run()
    assert answer.status == 400
    assert "chat_template_args.namespace" in answer.json["message"]
