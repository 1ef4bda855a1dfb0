"""No body costs the event loop more than a moment, whatever is in it, and one that is refused costs little memory.

Bodies are sent to the app in this process. The CPU time of the loop's thread between two turns of the loop is what one
piece of work costs; unlike real time it does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.body_attacks import ATTACKS, CHAT, COMPLETION, RIGHT, Attack, peak_bytes, send
from operators.text import validate
from pipeline import InvalidArgument
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from serving.http import HttpOptions
from serving.http.body import ArrivingBody, Body, TooMuchToParse, parse, parse_body
from serving.limits import HttpLimits

PIECE_S = 0.05
"""The bound of the issue; 20 ms is the aim, and the rest is for machines that are busy or slow."""
SIZE = 2_000_000
ERROR_BYTES_MAX = 4096


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_body_takes_the_loop_for_long_and_its_error_is_short(attack: Attack) -> None:
    """Before, 1 MB of empty prompts took 3 s, and 3 million unknown fields came back in an error of 35 MB."""
    found = anyio.run(send, attack.body(SIZE), attack.path)
    assert found.status in attack.statuses
    assert found.loop_s < PIECE_S
    assert len(found.answer) <= ERROR_BYTES_MAX
    if found.status != 200:
        assert json.loads(found.answer)["code"] == found.status


@pytest.mark.parametrize("attack", RIGHT, ids=lambda attack: attack.name)
def test_a_long_body_that_is_right_is_taken_and_does_not_take_the_loop_either(attack: Attack) -> None:
    found = anyio.run(send, attack.body(SIZE), attack.path)
    assert found.status in attack.statuses
    assert found.loop_s < PIECE_S


def test_a_million_token_ids_are_taken() -> None:
    attack = next(attack for attack in RIGHT if attack.name == "a million token ids")
    found = anyio.run(send, attack.body(8_000_000), attack.path)
    assert found.status == 200
    assert found.loop_s < PIECE_S


@pytest.mark.parametrize("name", ["empty prompts", "messages", "unknown fields", "brackets that never close"])
def test_a_body_that_holds_too_much_is_refused_before_the_rest_of_it_is_read(name: str) -> None:
    attack = next(attack for attack in ATTACKS if attack.name == name)
    found = anyio.run(send, attack.body(5_000_000), attack.path)
    assert found.sent_bytes < 2_000_000


@pytest.mark.parametrize("name", ["empty prompts", "messages", "logit_bias", "unknown fields", "quotes"])
def test_a_refused_body_takes_little_memory(name: str) -> None:
    """33 MB of empty prompts once took 2.7 GB."""
    attack = next(attack for attack in ATTACKS if attack.name == name)
    assert peak_bytes(attack.body(SIZE), attack.path) < 8_000_000


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("control characters", 3),
        ("bytes that are no UTF-8", 3),
        ("a text too long", 3),
        ("escapes", 3),
        ("a wide text too long", 6),  # Python holds each character of it in four bytes
    ],
)
def test_a_body_of_one_text_takes_a_few_times_its_size(name: str, times: int) -> None:
    """The body as it arrived and the text in it, and 1 MB for a piece of work."""
    attack = next(attack for attack in ATTACKS if attack.name == name)
    body = attack.body(4_000_000)
    assert peak_bytes(body, attack.path) < times * len(body)


def test_a_body_that_arrives_byte_by_byte_is_held_as_its_bytes() -> None:
    """45 million parts of one byte each once were as many objects."""
    body = json.dumps({"model": "m", "prompt": "x" * 20_000}).encode()

    async def run() -> None:
        found = await send(body, COMPLETION, part_bytes=1)
        assert (found.status, found.sent_bytes) == (200, len(body))

    anyio.run(run)


async def read(body: bytes, limits: HttpLimits, part_bytes: int = 70_000) -> Body:
    arriving = ArrivingBody(45, limits)
    for at in range(0, len(body), part_bytes):
        await arriving.add(body[at : at + part_bytes])
    return arriving.complete()


LONG = b'"' + b"x" * 20_000 + b'"'
"""Makes a body one whose parts are counted."""


@pytest.mark.parametrize(
    ("limit", "body", "least"),
    [
        ("max_json_values", b'{"prompt":[' + b",".join([b"123456"] * 5000) + b"]}", 5001),
        ("max_json_parts", b'{"prompt":[' + b",".join([b'"abcdef"'] * 5000) + b"]}", 5003),
        ("max_json_parts", b'{"prompt":[' + b",".join([b"[ 1 ]"] * 5000) + b"]}", 5003),
        ("max_json_depth", b"[" * 50 + LONG + b"]" * 50, 50),
        ("max_json_depth", b'{"a":' * 50 + b"1" + b"}" * 50, 50),
    ],
)
async def test_what_the_json_holds_is_limited_while_it_arrives(limit: str, body: bytes, least: int) -> None:
    json.loads(body)
    assert (await read(body, HttpLimits(**{limit: least}))).content == body
    assert (await read(body, HttpLimits(**{limit: 0}))).content == body
    with pytest.raises(InvalidArgument) as refused:
        await read(body, HttpLimits(**{limit: least - 1}))
    exceeded = refused.value.exceeded
    assert exceeded is not None
    assert (exceeded.name, exceeded.threshold) == (limit, least - 1)
    assert least - 1 < exceeded.value <= least


MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "i", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("limit", "fields", "value"),
    [
        ("max_messages", {"messages": [MESSAGE] * 3}, 3),
        ("max_content_parts", {"messages": [MESSAGE | {"content": [{"type": "text", "text": "a"}] * 2}] * 2}, 4),
        ("max_tools", {"messages": [MESSAGE], "tools": [TOOL] * 3}, 3),
        ("max_prompt_characters", {"messages": [MESSAGE, MESSAGE | {"content": [{"type": "text", "text": "abc"}]}]}, 5),
        ("max_prompt_characters", {"messages": [{"role": "assistant", "tool_calls": [CALL] * 2}]}, 16),
        ("max_prompt_characters", {"prompt": "abcd"}, 4),
        ("max_prompt_characters", {"prompt": ["ab", "c"]}, 3),
        ("max_token_ids", {"prompt": [1, 2, 3]}, 3),
        ("max_token_ids", {"prompt": [[1, 2], [3]], "bad_words_token_ids": [[4], [5, 6]]}, 6),
        ("max_token_ids", {"prompt": "a", "allowed_token_ids": [1], "nvext": {"token_data": [2, 3]}}, 3),
        ("max_logit_bias_entries", {"prompt": "a", "logit_bias": {"1": 1, "2": 2}}, 2),
        ("max_field_entries", {"prompt": "a", "metadata": {"a": "1", "b": "2"}}, 2),
        ("max_field_entries", {"prompt": "a", "guided_choice": ["a", "b"]}, 2),
        ("max_field_entries", {"prompt": "a", "nvext": {"annotations": ["a", "b"]}}, 2),
        ("max_field_entries", {"prompt": "a", "nvext": {"extra_fields": ["a", "b"]}}, 2),
        ("max_field_entries", {"messages": [MESSAGE], "functions": [1, 2]}, 2),
        ("max_field_entries", {"messages": [MESSAGE], "modalities": ["text", "text"]}, 2),
    ],
)
def test_a_request_beyond_a_limit_is_refused_with_the_limit(limit: str, fields: dict[str, Any], value: int) -> None:
    kind = ChatCompletionRequest if "messages" in fields else CompletionRequest
    body = json.dumps({"model": "m", **fields}).encode()

    def check(threshold: int) -> None:
        limits = RequestLimits(**{limit: threshold})
        validate(parse(body, kind, request_limits=limits), ignore_unsupported=True, limits=limits)

    check(value)
    check(0)
    with pytest.raises(InvalidArgument, match=r"^Validation: ") as refused:
        check(value - 1)
    assert refused.value.exceeded is not None
    assert (refused.value.exceeded.name, refused.value.exceeded.value) == (limit, value)


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ('{"a":[' + "[]," * 7000 + "1]}", {"max_json_parts": 7000}),
        ('{"a":[' + "1," * 9000 + "1]}", {"max_json_values": 9000}),
        ('{"a":' + "[" * 101 + "]" * 101 + "}", {"max_json_depth": 100}),
    ],
)
def test_the_arguments_of_tool_calls_are_json_within_the_same_limits(arguments: str, limit: dict[str, int]) -> None:
    """In the body they are one text each, but a template is given what is in them."""
    calls = [{"id": "i", "function": {"name": "f", "arguments": arguments}}]
    body = json.dumps({"model": "m", "messages": [{"role": "assistant", "tool_calls": calls}]}).encode()
    parse(body, ChatCompletionRequest, HttpLimits(**dict.fromkeys(limit, 0)))
    with pytest.raises(InvalidArgument, match=r"^Validation: ") as refused:
        parse(body, ChatCompletionRequest, HttpLimits(**limit))
    assert refused.value.exceeded is not None
    assert refused.value.exceeded.name in limit
    assert refused.value.field == "messages"


def test_the_prompts_of_a_batch_are_counted_before_a_record_is_made_of_them() -> None:
    body = json.dumps({"model": "m", "prompt": [[1]] * 2000, "n": 2, "temperature": "hot"}).encode()
    with pytest.raises(InvalidArgument, match=r"^Validation: Total choices .* = 4000\) exceeds") as refused:
        parse(body, CompletionRequest)
    assert refused.value.field == "prompt"


@pytest.mark.parametrize(
    "value",
    [
        b"1" * 100_000,
        b"-" + b"9" * 100_000,
        b"1e400",
        b"NaN",
        b"-Infinity",
        b"1.",
        b'"\\ud800"',
        b'"\\ud800\\u0041"',
        b'"\\u12"',
        b'{"a":1',
        b"\x00",
        b"'x'",
        b"[" * 99 + b"1" + b"]" * 99,
        b"[" * 100_000,
    ],
    ids=lambda value: str(value[:12]),
)
@pytest.mark.parametrize("field", [b"prompt", b"temperature", b"max_tokens", b"logit_bias"])
def test_a_value_that_cannot_be_is_a_clear_error(field: bytes, value: bytes) -> None:
    body = b'{"model":"m","' + field + b'":' + value + b"}"
    found = anyio.run(send, body, COMPLETION)
    assert found.status == 400
    assert json.loads(found.answer)["message"].startswith(("Failed to deserialize the JSON body", "Validation: "))


def test_of_a_field_given_twice_the_last_counts() -> None:
    assert parse(b'{"model":"a","prompt":"x","model":"b"}', CompletionRequest).model == "b"


def test_a_nul_in_a_text_is_a_character_as_others() -> None:
    assert parse(b'{"model":"m","prompt":"a\\u0000b\x00"}', CompletionRequest).prompt == "a\0b\0"


def test_broken_json_is_repaired_up_to_its_limit_only(monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"model":"m","prompt":"a\n"}'
    assert parse(body, CompletionRequest, HttpLimits(max_repaired_bytes=len(body))).prompt == "a\n"
    assert parse(body, CompletionRequest, HttpLimits(max_repaired_bytes=0)).prompt == "a\n"
    monkeypatch.setattr("serving.http.body.repair", lambda _: pytest.fail("repaired"))
    with pytest.raises(InvalidArgument, match="invalid character"):
        parse(body, CompletionRequest, HttpLimits(max_repaired_bytes=len(body) - 1))


@given(st.text('"\\\n\x01\x1fax{}', max_size=200), st.integers(2, 40))
@settings(max_examples=50)
def test_a_long_body_is_parsed_as_a_short_one(text: str, times: int) -> None:
    """In pieces and in one, repaired and not: the same record, or the same refusal."""
    body = b'{"model":"m","prompt":"' + (text * times).encode() + b'","user":"' + b"u" * 300_000 + b'"}'
    short = body.replace(b"u" * 300_000, b"u")
    try:
        expected = parse(short, CompletionRequest).prompt
    except InvalidArgument:
        with pytest.raises(InvalidArgument):
            parse(body, CompletionRequest)
        return
    found = parse(body, CompletionRequest)
    assert (found.prompt, found.user) == (expected, "u" * 300_000)


LONG_BODY = Body(bytearray(b'{"model":"m","prompt":[' + b"1," * 300_000 + b"1]}"), is_short=False)


def test_a_long_body_is_parsed_in_another_thread_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def parsing(*given: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*given, **named)

    monkeypatch.setattr("serving.http.body.parse", parsing)

    async def run() -> None:
        await parse_body(LONG_BODY, CompletionRequest, HttpOptions())
        await parse_body(
            Body(bytearray(b'{"model":"m","prompt":"x"}'), is_short=True), CompletionRequest, HttpOptions()
        )

    anyio.run(run)
    assert threads[0] != threads[1] == threading.get_ident()


def test_a_request_that_is_cancelled_does_not_wait_for_its_parsing_which_ends_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that is not in use any more is not in the way of the next request's either."""
    begun, ended = threading.Event(), threading.Event()

    def endless(*_: Any, pause: Any, **__: Any) -> Any:
        begun.set()
        try:
            while True:
                pause()
        finally:
            ended.set()

    async def run() -> None:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(2 * HttpLimits().parser_threads):
                    tasks.start_soon(parse_body, LONG_BODY, CompletionRequest, HttpOptions())
                await anyio.to_thread.run_sync(begun.wait)
                tasks.cancel_scope.cancel()
            await anyio.to_thread.run_sync(ended.wait)
            monkeypatch.undo()
            assert len((await parse_body(LONG_BODY, CompletionRequest, HttpOptions())).prompt) == 300_001  # type: ignore[arg-type]

    monkeypatch.setattr("serving.http.body.parse", endless)
    anyio.run(run)


def test_bodies_that_wait_to_be_parsed_are_bounded_also_when_their_clients_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def parsing(*_: Any, **__: Any) -> Any:
        may_end.wait(10)

    monkeypatch.setattr("serving.http.body.parse", parsing)
    options = HttpOptions(limits=HttpLimits(max_body_bytes_in_flight=5 * len(LONG_BODY.content)))

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(parse_body, LONG_BODY, CompletionRequest, options)
            await anyio.sleep(0.05)
            with pytest.raises(TooMuchToParse) as refused:
                await parse_body(LONG_BODY, CompletionRequest, options)
            assert refused.value.exceeded is not None
            assert refused.value.exceeded.name == "max_body_bytes_in_flight"
            may_end.set()
        await parse_body(LONG_BODY, CompletionRequest, options)

    anyio.run(run)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, {"messages": [MESSAGE], "tools": [{"function": {"name": "!" * 300_000}}]}),
        (CHAT, {"messages": [MESSAGE], "tool_choice": {"function": {"name": "x" * 300_000}}}),
        (CHAT, {"messages": [MESSAGE], "modalities": ["x" * 300_000]}),
        (CHAT, {"messages": [MESSAGE], "service_tier": "x" * 300_000}),
        (CHAT, {"messages": [{"role": "x" * 300_000}]}),
        (CHAT, {"messages": [MESSAGE | {"content": [{"type": "x" * 300_000}]}]}),
        (COMPLETION, {"prompt": "x", "logit_bias": {"x" * 300_000: 1000}}),
        (COMPLETION, {"prompt": "x", "logit_bias": {"x" * 300_000: "x"}}),
        (COMPLETION, {"prompt": "x", "nvext": {"x" * 300_000: 1}}),
        (COMPLETION, {"prompt": "x", "max_tokens": "x" * 300_000}),
        (COMPLETION, {"prompt": "x", "max_tokens": 10**4000}),
        (COMPLETION, {"prompt": ["x", ""], "u" * 300_000: 1}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_no_error_repeats_much_of_its_request(path: str, field: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **field}).encode()
    kind = ChatCompletionRequest if path == CHAT else CompletionRequest

    def check() -> None:
        validate(parse(body, kind))

    with pytest.raises(InvalidArgument) as refused:
        check()
    assert len(refused.value.message) + len(refused.value.field) < 600
    found = anyio.run(send, body, path)
    assert found.status == 400
    assert len(found.answer) < 1000


async def test_virtual_time_does_not_pass_while_a_long_body_is_parsed() -> None:
    began_s = anyio.current_time()
    with anyio.move_on_after(3600) as hour:
        await parse_body(LONG_BODY, CompletionRequest, HttpOptions())
    assert not hour.cancelled_caught
    assert anyio.current_time() - began_s < 60
