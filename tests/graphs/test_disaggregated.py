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

pytestmark = pytest.mark.anyio

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


async def ask(graph: Any, number: int = 0) -> str:
    """The text of the answer. Raises what it ends with."""
    texts = []
    async with await graph.generate(Context(chat(number), id=str(number))) as stream:
        async for item in stream:
            item = item.ok()
            if item.data is not None:
                texts.append(item.data.text or "")
    assert len("".join(texts)) == TOKENS
    return "".join(texts)


def prefilled(fleet: Any) -> int:
    """How many prompts prefill workers have computed or begun, those that are gone included."""
    engines = [engine for engine in fleet.engines if engine.args.worker_type == "prefill"]
    return sum(engine.requests for engine in engines)


async def settle() -> None:
    await anyio.sleep(60)


# -- without prefill workers


async def test_without_prefill_workers_requests_are_computed_where_they_are_decoded(fleet: Any) -> None:
    async with fleet(2, 2) as it:
        answer = await ask(it.graph)
        assert prefilled(it) == 1
        gone = it.of("prefill")
        it.remove(gone)
        await anyio.sleep(0.1)
        assert await ask(it.graph) == answer
        assert prefilled(it) == 1
        await it.add("prefill", gone[0].worker_id)
        await anyio.sleep(0.1)
        assert await ask(it.graph) == answer
        assert prefilled(it) == 2
        await settle()
        it.assert_idle()


async def test_enforced_disaggregation_refuses_while_nobody_prefills(fleet: Any) -> None:
    async with fleet(2, 2, enforce_disagg=True) as it:
        answer = await ask(it.graph)
        it.remove(it.of("prefill"))
        await anyio.sleep(0.1)
        with pytest.raises(PrefillNotActivated) as caught:
            await ask(it.graph)
        assert caught.value.facts.status == 503
        await it.add("prefill")
        await anyio.sleep(0.1)
        assert await ask(it.graph) == answer
        await settle()
        it.assert_idle()


# -- hand-overs


@pytest.mark.parametrize("verb", ["stop", "kill", "close", "cancel"])
@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.01, 0.02, 0.03, 0.2])
@pytest.mark.parametrize("meets", [True, False])
async def test_a_client_that_goes_during_a_hand_over_stops_no_prefill(
    fleet: Any, verb: str, after_s: float, meets: bool
) -> None:
    """From the moment it was sent to a worker that promises nothing; its blocks come free all the same."""
    async with fleet(1, 1, meets=meets, stops_prefills=False) as it:
        request = Context(chat(tokens=60))
        with anyio.move_on_after(after_s if verb == "cancel" else 30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, it.graph, request, after_s if verb == "close" else None)
                if verb in ("stop", "kill"):
                    await anyio.sleep(after_s)
                    getattr(request, verb)()
        await settle()
        (host,) = it.of("prefill")
        assert (host.engine.requests, host.engine.stopped) in [(1, 0), (0, 0)]
        assert host.engine.requests or after_s == 0
        it.assert_idle()


async def read(graph: Any, request: Context[Any], closes_after_s: float | None) -> None:
    with suppress(Cancelled):
        async with await graph.generate(request) as stream:
            with anyio.move_on_after(closes_after_s if closes_after_s is not None else 60):
                async for _ in stream:
                    pass


async def test_a_prefill_worker_that_dies_while_decode_waits_for_its_blocks_is_replaced(fleet: Any) -> None:
    """Decode hears of it before the router does, and its own error says nothing of why."""
    async with fleet(2, 2) as it:
        answers = [await ask(it.graph, number) for number in range(20)]
        graph = it.graph.insert_before(Detokenize, attempts := Attempts())
        found: dict[int, str] = {}

        async def client(number: int) -> None:
            found[number] = await ask(graph, number)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(client, number)
            await anyio.sleep(0.01)
            busiest = max(it.of("prefill"), key=lambda host: host.engine.ranks[0].live)
            assert busiest.engine.ranks[0].live
            it.remove([busiest])
        assert [found[number] for number in range(20)] == answers
        assert max(attempts.of.values()) == 2
        await settle()
        it.assert_idle()


async def test_requests_in_line_for_a_prefill_worker_that_fails_go_to_another(fleet: Any) -> None:
    async with fleet(2, 2) as it:
        it.of("prefill")[0].engine.timing.stall_ms = 1e12
        found: list[str] = []

        async def client(number: int) -> None:
            found.append(await ask(it.graph, number))

        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(client, number)
        assert len(found) == 30
        it.remove(it.of("prefill")[:1])
        await settle()
        it.assert_idle()


# -- silence


@pytest.mark.parametrize(("half", "limit_s"), [("prefill", 2), ("decode", 4)])
async def test_a_worker_that_says_nothing_for_too_long_loses_its_request_to_another(
    fleet: Any, half: str, limit_s: float
) -> None:
    """Decode workers have longer: those that wait for blocks are not to blame for a silent prefill."""
    async with fleet(2, 2) as it:
        answer = await ask(it.graph)
        for host in it.of(half):
            if host.engine.requests:  # its blocks are there, so it gets the same again
                host.engine.timing.stall_ms = 1e12
        began_s = anyio.current_time()
        for _ in range(4):
            assert await ask(it.graph) == answer
        assert limit_s <= anyio.current_time() - began_s < limit_s + 2
        it.remove(it.of(half))
        await settle()
        it.assert_idle()


# -- restarts


@pytest.mark.parametrize("way", ["drain", "abort", "fail"])
async def test_a_rolling_restart_under_load_loses_nothing_and_doubles_nothing(fleet: Any, way: Any) -> None:
    async with fleet(2, 3) as it:
        answers = [await ask(it.graph, number) for number in range(10)]
        wrong: list[Any] = []
        done = anyio.Event()
        asked = 0

        async def client(number: int) -> None:
            nonlocal asked
            while not done.is_set():
                try:
                    text = await ask(it.graph, number)
                except PenstockError as error:
                    wrong.append(error)
                    return
                asked += 1
                if text != answers[number]:
                    wrong.append(text)

        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(client, number)
            for host in list(it.hosts):
                it.remove([host], way)
                await host.gone.wait()
                await anyio.sleep(0.2)
                await it.add(host.half, host.worker_id)
                await anyio.sleep(0.5)
            done.set()
        assert not wrong
        assert asked > 30
        await settle()
        it.assert_idle()
