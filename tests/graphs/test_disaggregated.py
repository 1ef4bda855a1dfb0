"""The whole disaggregated graph where its workers leave, return, stall and are replaced."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import anyio
import pytest

from operators import Detokenize
from operators.prefill import PrefillNotActivated
from pipeline import AsyncEngine, Cancelled, Context, Operator, PenstockError, ResponseStream
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage
from tests.graphs.worlds import Fleet, Half, Way, open_fleet

TOKENS = 12


class Attempts(Operator[Any, Any, Any, Any]):
    """Counts how often each request was sent."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        self.of[request.id] += 1
        return await next.generate(request)


def chat(number: int = 0, tokens: int = TOKENS) -> ChatCompletionRequest:
    message = ChatMessage(role="user", content=f"request number {number}")
    return ChatCompletionRequest(model="echo", messages=[message], max_tokens=tokens, seed=number)


async def text_of(graph: AsyncEngine[Any, Any], number: int = 0) -> str:
    """The text of the answer to a chat of that number. Raise the error that the answer ends with."""
    texts = []
    async with await graph.generate(Context(chat(number), id=str(number))) as stream:
        async for item in stream:
            item = item.ok()
            if item.data is not None:
                texts.append(item.data.text or "")
    assert len("".join(texts)) == TOKENS
    return "".join(texts)


def prefilled(fleet: Fleet) -> int:
    """How many prompts the prefill workers have got, including those workers that are gone."""
    engines = [engine for engine in fleet.engines if engine.args.worker_type == "prefill"]
    return sum(engine.requests for engine in engines)


async def settle() -> None:
    """Wait until nothing is under way."""
    await anyio.sleep(60)


# -- without prefill workers


async def test_without_prefill_workers_requests_are_computed_where_they_are_decoded() -> None:
    async with open_fleet(2, 2) as fleet:
        answer = await text_of(fleet.graph)
        assert prefilled(fleet) == 1
        gone = fleet.of("prefill")
        fleet.remove(gone)
        await anyio.sleep(0.1)
        assert await text_of(fleet.graph) == answer
        assert prefilled(fleet) == 1
        await fleet.add("prefill", gone[0].worker_id)
        await anyio.sleep(0.1)
        assert await text_of(fleet.graph) == answer
        assert prefilled(fleet) == 2
        await settle()
        fleet.assert_idle()


async def test_enforced_disaggregation_refuses_while_there_is_no_prefill_worker() -> None:
    async with open_fleet(2, 2, enforce_disagg=True) as fleet:
        answer = await text_of(fleet.graph)
        fleet.remove(fleet.of("prefill"))
        await anyio.sleep(0.1)
        with pytest.raises(PrefillNotActivated) as caught:
            await text_of(fleet.graph)
        assert caught.value.facts.status == 503
        await fleet.add("prefill")
        await anyio.sleep(0.1)
        assert await text_of(fleet.graph) == answer
        await settle()
        fleet.assert_idle()


# -- transfers


@pytest.mark.parametrize("verb", ["stop", "kill", "close", "cancel"])
@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01, 0.02, 0.03, 0.2])
@pytest.mark.parametrize("meets", [True, False])
async def test_a_client_that_leaves_during_a_transfer_stops_no_prefill(verb: str, after_s: float, meets: bool) -> None:
    """Once the prefill was sent, to a worker that does not promise stops; its blocks come free all the same."""
    async with open_fleet(1, 1, meets=meets, stops_prefills=False) as fleet:
        request = Context(chat(tokens=60))
        with anyio.move_on_after(after_s if verb == "cancel" else 30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, fleet.graph, request, after_s if verb == "close" else None)
                if verb in ("stop", "kill"):
                    await anyio.sleep(after_s)
                    getattr(request, verb)()
        await settle()
        (host,) = fleet.of("prefill")
        assert (host.engine.requests, host.engine.stopped) in [(1, 0), (0, 0)]
        assert host.engine.requests or after_s == 0
        fleet.assert_idle()


async def read(graph: AsyncEngine[Any, Any], request: Context[Any], closes_after_s: float | None) -> None:
    """Send the request and read its answer, for so long; a cancellation is no error."""
    with suppress(Cancelled):
        async with await graph.generate(request) as stream:
            with anyio.move_on_after(closes_after_s if closes_after_s is not None else 60):
                async for _ in stream:
                    pass


async def test_a_prefill_worker_that_dies_while_decode_waits_for_its_blocks_is_replaced() -> None:
    """Decode notices it before the router does, and its own error does not name the cause."""
    async with open_fleet(2, 2) as fleet:
        answers = [await text_of(fleet.graph, number) for number in range(20)]
        graph = fleet.graph.insert_before(Detokenize, attempts := Attempts())
        found: dict[int, str] = {}

        async def client(number: int) -> None:
            found[number] = await text_of(graph, number)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(client, number)
            await anyio.sleep(0.01)
            busiest = max(fleet.of("prefill"), key=lambda host: host.engine.ranks[0].live)
            assert busiest.engine.ranks[0].live
            fleet.remove([busiest])
        assert [found[number] for number in range(20)] == answers
        assert max(attempts.of.values()) == 2
        await settle()
        fleet.assert_idle()


async def test_requests_queued_for_a_prefill_worker_that_fails_go_to_another() -> None:
    async with open_fleet(2, 2) as fleet:
        fleet.of("prefill")[0].engine.timing.stall_ms = 1e12
        found: list[str] = []

        async def client(number: int) -> None:
            found.append(await text_of(fleet.graph, number))

        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(client, number)
        assert len(found) == 30
        fleet.remove(fleet.of("prefill")[:1])
        await settle()
        fleet.assert_idle()


# -- silence


@pytest.mark.parametrize(("half", "limit_s"), [("prefill", 2), ("decode", 4)])
async def test_a_worker_that_is_silent_for_too_long_loses_its_request_to_another(half: Half, limit_s: float) -> None:
    """The limit of decode workers is longer: a decode worker that waits for blocks is not to blame for the prefill."""
    async with open_fleet(2, 2) as fleet:
        answer = await text_of(fleet.graph)
        for host in fleet.of(half):
            if host.engine.requests:  # the prompt's blocks are cached there, so it gets the same chat again
                host.engine.timing.stall_ms = 1e12
        began_s = anyio.current_time()
        for _ in range(4):
            assert await text_of(fleet.graph) == answer
        assert limit_s <= anyio.current_time() - began_s < limit_s + 2
        fleet.remove(fleet.of(half))
        await settle()
        fleet.assert_idle()


# -- restarts


@pytest.mark.parametrize("clients", [4, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["drain", "abort", "fail"])
async def test_a_rolling_restart_under_load_neither_loses_nor_repeats_a_token(way: Way, clients: int) -> None:
    async with open_fleet(2, 3) as fleet:
        answers = [await text_of(fleet.graph, number) for number in range(clients)]
        wrong: list[Any] = []
        done = anyio.Event()
        answered = 0

        async def client(number: int) -> None:
            nonlocal answered
            while not done.is_set():
                try:
                    text = await text_of(fleet.graph, number)
                except PenstockError as error:
                    wrong.append(error)
                    return
                answered += 1
                if text != answers[number]:
                    wrong.append(text)

        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                tasks.start_soon(client, number)
            for host in list(fleet.hosts):
                fleet.remove([host], way)
                await host.gone.wait()
                await anyio.sleep(0.2)
                await fleet.add(host.half, host.worker_id)
                await anyio.sleep(0.5)
            done.set()
        assert not wrong
        assert answered > 3 * clients
        await settle()
        fleet.assert_idle()
