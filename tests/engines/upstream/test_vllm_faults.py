"""Errors, wherever a server sends them, and answers that are cut, garbled, doubled or late."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from pipeline.errors import (
    BackendCannotConnect,
    BackendResponseTimeout,
    BackendUnknown,
    CannotConnect,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    InvalidMessage,
    PenstockError,
    ResponseTimeout,
    StatusError,
    StreamIncomplete,
    WorkerOverloaded,
)
from pipeline.protocols import PreprocessedRequest, RoutingHints
from tests.engines.upstream.vllm_worlds import fake_vllm, started
from tests.engines.upstream.wire import Line, as_event
from tests.engines.upstream.worlds import Fault, continued, cut, outputs, prompt, sends, tokens_of


def error(code: int, message: str = "it broke") -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": code}}


async def end_body(line: Line) -> None:
    """The body ends as HTTP announces it."""
    await line.end()
    raise anyio.ClosedResourceError  # the server has nothing more for this connection


async def silence(line: Line) -> None:
    await anyio.sleep_forever()


CHUNK = {"choices": [{"index": 0, "token_ids": [7], "finish_reason": None}]}
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
FAULTS: dict[str, tuple[Fault, type[PenstockError]]] = {
    "an error": (sends(error(500)), BackendUnknown),
    "a dead engine": (sends(error(500, DEAD)), EngineShutdown),
    "the answer given up": (sends({"choices": [CHUNK["choices"][0] | {"finish_reason": "abort"}]}), EngineShutdown),
    "a failed answer": (sends({"choices": [CHUNK["choices"][0] | {"finish_reason": "error"}]}), BackendUnknown),
    "done too early": (sends("[DONE]"), StreamIncomplete),
    "a cut connection": (cut, Disconnected),
    "a body that ends": (end_body, StreamIncomplete),
    "no JSON": (sends("{"), InvalidMessage),
    "no object": (sends("[1]"), InvalidMessage),
    "no choices": (sends({"id": "x"}), InvalidMessage),
    "another choice": (sends({"choices": [CHUNK["choices"][0] | {"index": 1}]}), InvalidMessage),
    "texts for ids": (sends({"choices": [CHUNK["choices"][0] | {"token_ids": ["7"]}]}), InvalidMessage),
    "a negative id": (sends({"choices": [CHUNK["choices"][0] | {"token_ids": [-7]}]}), InvalidMessage),
    "half an event": (sends(b'data: {"choices": [{"index'), InvalidMessage),
    "silence": (silence, ResponseTimeout),
}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_broken_answer_raises_its_error_behind_the_tokens_so_far(name: str, place: int) -> None:
    fault, kind = FAULTS[name]
    async with fake_vllm(faults={place: fault}) as server, started(server, silence_s=5.0) as engine:
        found: list[int] = []
        with pytest.raises(kind):
            await outputs(engine, prompt(5), into=found)
        assert found[:place] == continued([5, 6, 7], 5)[:place]
        server.faults.clear()
        assert tokens_of(await outputs(engine)) == continued([5, 6, 7], 5)


@pytest.mark.parametrize("event", [1, 5], ids=["an event twice", "a token more than was counted"])
async def test_a_repeated_token_is_found_by_the_servers_count(event: int) -> None:
    async def twice(line: Line) -> None:
        await line.event(CHUNK)
        await line.event(CHUNK)

    async with fake_vllm(faults={1: twice}) as server, started(server) as engine:
        with pytest.raises(InvalidMessage, match="counted 5 tokens and sent 6"):
            await outputs(engine, prompt(5))


async def test_a_lost_token_is_found_by_the_servers_count() -> None:
    async with fake_vllm(faults={1: sends(b": a comment\n\n")}) as server, started(server) as engine:
        with pytest.raises(InvalidMessage, match="counted 5 tokens and sent 4"):
            await outputs(engine, prompt(5))


async def test_an_answer_whose_choices_have_ended_is_whole_without_its_end() -> None:
    async with fake_vllm(faults={5: cut}) as server, started(server) as engine:
        found = await outputs(engine, prompt(5))
    assert tokens_of(found) == continued([5, 6, 7], 5)
    assert found[-1].completion_usage is not None


async def test_events_may_be_cut_anywhere_and_come_together() -> None:
    async def in_pieces(line: Line) -> None:
        data = as_event(CHUNK) + as_event(CHUNK)
        for place in range(0, len(data), 7):
            await line.put(data[place : place + 7])

    together = sends(as_event(CHUNK) * 3 + b": a comment\n\n" + as_event(CHUNK))
    crlf = sends(as_event(CHUNK).replace(b"\n", b"\r\n"))
    for fault, tokens in ((in_pieces, 2), (together, 4), (crlf, 1)):
        usage = as_event({"choices": [], "usage": {"completion_tokens": 4 + tokens}})
        async with fake_vllm(faults={1: fault, 5: sends(usage)}) as server, started(server) as engine:
            assert tokens_of(await outputs(engine, prompt(5))).count(7) == tokens


STATUSES: list[tuple[int, type[PenstockError]]] = [
    (400, InvalidArgument),
    (422, InvalidArgument),
    (429, WorkerOverloaded),
    (503, WorkerOverloaded),
    (529, WorkerOverloaded),
    (401, StatusError),
    (307, StatusError),
    (404, StatusError),
    (500, BackendUnknown),
    (502, BackendCannotConnect),
    (504, BackendResponseTimeout),
    (599, BackendUnknown),
]


@pytest.mark.parametrize(("status", "kind"), STATUSES)
async def test_a_status_is_its_error(status: int, kind: type[PenstockError]) -> None:
    async with fake_vllm(status=status) as server:
        server.status = None
        async with started(server) as engine:
            server.status = status
            with pytest.raises(kind) as raised:
                await outputs(engine)
            assert type(raised.value) is kind


async def test_an_unknown_adapter_is_a_status_for_the_client() -> None:
    async with fake_vllm() as server, started(server) as engine:
        with pytest.raises(StatusError, match="does not exist") as caught:
            await outputs(engine, prompt(routing=RoutingHints(lora_name="greek")))
        assert caught.value.status == 404


async def test_a_server_that_is_killed_in_mid_answer_breaks_the_streams_and_takes_no_others() -> None:
    async with fake_vllm() as server, started(server) as engine:
        found: list[int] = []
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                with pytest.raises(Disconnected):
                    await outputs(engine, prompt(100), into=found)

            tasks.start_soon(read)
            await anyio.sleep(0.105)
            server.kill()
        assert found == continued([5, 6, 7], len(found))
        assert len(found) == 10
        with pytest.raises(CannotConnect):
            await outputs(engine)


async def test_a_prompt_longer_than_the_context_is_a_wrong_request() -> None:
    async with fake_vllm(context_length=8) as server, started(server) as engine:
        with pytest.raises(PenstockError) as caught:
            await outputs(engine, PreprocessedRequest([5] * 9))
        assert caught.value.facts.status == 400


@pytest.mark.parametrize("spaced", [True, False])
async def test_tokens_that_come_together_with_an_error_are_delivered_before_it(spaced: bool) -> None:
    together = as_event(CHUNK) + as_event(error(500, DEAD))
    fault = sends(b": a comment\n\n" + together if spaced else together)
    async with fake_vllm(faults={0: fault}) as server, started(server) as engine:
        found: list[int] = []
        with pytest.raises(EngineShutdown):
            await outputs(engine, prompt(5), into=found)
        assert found == [7]
