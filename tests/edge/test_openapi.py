"""`/openapi.json` describes what the app does: by a validator, by every answer, and by the tables that validate."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from operators import Detokenize, Model, Preprocess
from pipeline import Annotated, function_engine
from pipeline.protocols import FinishReason, LLMEngineOutput, PreprocessedRequest
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.testing import ScriptedEngine
from serving.http import HttpOptions, app
from serving.http.json_schema import Schemas
from serving.http.openapi import describe
from tests.serving.worlds import Exchange

KINDS = (ChatCompletionRequest, CompletionRequest)


def test_the_description_is_valid_openapi() -> None:
    document = describe(HttpOptions())
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []


async def test_the_app_serves_its_description_at_a_path_of_choice() -> None:
    options = HttpOptions.from_environment(
        {"DYN_HTTP_SVC_OPENAPI_PATH": "/api.json", "DYN_HTTP_SVC_CHAT_PATH": "/chat"}
    )
    service = app({"m": ScriptedEngine([])}, options=options)
    answer = await Exchange(service, "/api.json", method="GET").run()
    assert answer.status == 200
    assert answer.json == json.loads(json.dumps(describe(options)))
    assert {"/chat", "/api.json"} <= answer.json["paths"].keys()


async def test_the_page_has_every_path_field_and_limit_and_needs_no_other_file() -> None:
    answer = await Exchange(app({"m": ScriptedEngine([])}), "/docs", method="GET").run()
    text, document = answer.content.decode(), describe(HttpOptions())
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    for name in (*document["paths"], *fields, *document["x-limits"]):
        assert name in text
    assert answer.response_headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"<script|<link|src=|https?://", text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_request_is_described_with_its_range(kind: Any) -> None:
    schema = describe(HttpOptions())["components"]["schemas"][kind.__name__]
    assert {each.name for each in attrs.fields(kind)} - {"unsupported"} <= schema["properties"].keys()
    temperature, n = schema["properties"]["temperature"], schema["properties"]["n"]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert (n["minimum"], n["maximum"]) == (1, 128)
    assert schema["properties"]["top_p"]["exclusiveMinimum"] == 0


def test_a_limit_is_described_as_it_is_set() -> None:
    document = describe(HttpOptions(request_limits=RequestLimits(max_tools=3)))
    assert document["components"]["schemas"]["ChatCompletionRequest"]["properties"]["tools"]["maxItems"] == 3
    assert document["x-limits"]["max_tools"]["value"] == 3
    unlimited = describe(HttpOptions(request_limits=RequestLimits(max_tools=0)))
    assert "maxItems" not in unlimited["components"]["schemas"]["ChatCompletionRequest"]["properties"]["tools"]


def test_a_record_is_described_as_it_is_read_or_written() -> None:
    read, write = Schemas("read"), Schemas("write")
    for schemas in (read, write):
        schemas.of(ChatCompletionRequest)
    assert read.components["FunctionCall"]["required"] == ["name"]
    assert write.components["FunctionCall"]["required"] == ["name", "arguments"]
    assert read.components["NvExt"]["additionalProperties"] is False
    with pytest.raises(TypeError, match="no JSON schema"):
        read.of(tuple[int, str])


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]


@function_engine
async def says_hi(request: PreprocessedRequest) -> AsyncIterator[Annotated[LLMEngineOutput]]:
    """Belongs to no loop: schemathesis has a new one for each request."""
    choices = request.sampling_options.n or 1
    for index in range(choices):
        yield Annotated(LLMEngineOutput(list(b"hi"), index=index))
    for index in range(choices):
        yield Annotated(LLMEngineOutput([], index=index, finish_reason=FinishReason.STOP))


def operations(change: Callable[[dict[str, Any]], object] = bool) -> list[Any]:
    """The description that the app itself gives, after this change."""
    model = Model.byte_level("echo")
    service = app({"echo": Preprocess(model) >> Detokenize(model) >> says_hi})
    document = describe(HttpOptions())
    change(document)
    schema = schemathesis.openapi.from_dict(document)
    schema.app = service
    return [each.ok() for each in schema.get_all_operations()]  # type: ignore[union-attr]


def hold(operation: Any, mode: GenerationMode, examples: int = 10) -> None:
    """Hold every check over so many requests, right ones or wrong ones."""

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body["model"] = "echo"
        response = case.call()
        # What there will never be is refused with 501, which is no failure of the server.
        checks = [check for check in CHECKS if check is not not_a_server_error or response.status_code != 501]
        case.validate_response(response, checks=checks)

    answers()


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.label)
def test_a_right_request_is_answered_as_described(operation: Any) -> None:
    hold(operation, GenerationMode.POSITIVE)


@pytest.mark.parametrize("operation", [each for each in operations() if each.body], ids=lambda each: each.label)
def test_a_wrong_request_is_answered_as_described(operation: Any) -> None:
    hold(operation, GenerationMode.NEGATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", [each for each in operations() if each.body], ids=lambda each: each.label)
def test_many_requests_are_answered_as_described(operation: Any, mode: GenerationMode) -> None:
    hold(operation, mode, 1000)


def _forget_a_status(document: dict[str, Any]) -> None:
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("200")


def _want_another_type(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        schema.get("properties", {}).pop("created", None)
        schema["required"] = ["created_at"]


@pytest.mark.parametrize("change", [_forget_a_status, _want_another_type])
def test_a_description_that_is_wrong_is_noticed(change: Callable[[dict[str, Any]], object]) -> None:
    models = next(each for each in operations(change) if each.label == "GET /v1/models")
    with pytest.raises(FailureGroup):
        hold(models, GenerationMode.POSITIVE)
