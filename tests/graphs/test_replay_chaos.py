"""Replays with prefill and decode pools, deaths and rolling restarts: no token is lost, doubled or wrong.

Each answer is compared with that of an engine nothing happens to. The whole of a real trace is for `benchmarks.chaos`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from random import Random
from typing import Any

import pytest

from benchmarks.chaos import Outcome, chaos, chaos_config
from benchmarks.chaos_load import chaos_script, conversation_load
from benchmarks.ledger import AnswerRecord, Ledger
from engines import as_engine
from engines.mocker import MockEngine
from pipeline import Annotated, AsyncEngine, Context, Disconnected, Operator, ResponseStream, Unavailable
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PreprocessedRequest
from serving.replay import Schedule, parse_faults
from serving.replay.driver import request_of

LETTERS = range(97, 123)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable logging: most of what happens here logs a warning."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


async def play(requests: int, workers: int, prefill_workers: int, deaths: int, meets: bool, rate: float) -> Outcome:
    """Replay a trace under deaths and a rolling restart: all answers are whole, and nothing is left.

    Caches have room for some of the prompts only.
    """
    rng = Random(7)
    trace = conversation_load(requests, rng, rate)
    script = chaos_script(trace, workers, prefill_workers, deaths=deaths, rng=rng)
    config = chaos_config(workers, prefill_workers, seed=7, meets=meets, num_gpu_blocks="500")
    outcome = await chaos(config, trace, script)
    assert outcome.problems == []
    assert outcome.broken == {}
    report = outcome.report
    assert report.completed_requests == report.num_requests == trace.requests == requests
    assert report.total_output_tokens == trace.output_tokens
    assert len(outcome.deaths) == 2 * deaths + workers + prefill_workers
    return outcome


@pytest.mark.parametrize("meets", [True, False], ids=["joining transfers", "waiting for prefills"])
async def test_no_token_is_lost_or_repeated_while_workers_die_return_and_restart(meets: bool) -> None:
    outcome = await play(50, 3, 2, 6, meets, rate=3.0)
    assert outcome.report.migrations > 3
    assert sum(death.sequences > 0 for death in outcome.deaths) > 3
    assert any(death.transfers for death in outcome.deaths) is meets


@pytest.mark.slow
@pytest.mark.parametrize("meets", [True, False], ids=["joining transfers", "waiting for prefills"])
async def test_no_token_is_lost_or_repeated_in_thousands_of_requests(meets: bool, anyio_backend_name: str) -> None:
    requests = 3000 if anyio_backend_name == "asyncio" else 600
    outcome = await play(requests, 6, 3, requests // 30, meets, rate=1.7)
    disturbed = [death for death in outcome.deaths if death.sequences]
    assert {death.fault.role for death in disturbed} == {"decode", "prefill"}
    assert len(disturbed) > requests // 50
    assert outcome.report.migrated_requests > requests // 30
    assert sum(death.transfers > 0 for death in outcome.deaths) > (requests // 50 if meets else -1)


async def test_only_requests_that_the_script_explains_are_refused() -> None:
    """No worker decodes for three seconds: only requests that came then or were under way fail. Their tokens until
    then are right, and the later turns of their sessions are not sent."""
    trace = conversation_load(40, Random(3))
    script = parse_faults(["worker 0 dies at 6, returns at 9", "worker 1 dies at 6, returns at 9"])
    outcome = await chaos(chaos_config(2, 2, seed=3), trace, script)
    assert outcome.problems == []
    broken = outcome.broken.values()
    began_s = min(record.began_s for record in outcome.ledger.records.values())
    for record in broken:
        assert type(record.error) is (Disconnected if record.began_s - began_s < 6 else Unavailable)
    assert all(6 <= (record.ended_s or 0) - began_s <= 9.01 for record in broken)
    assert any(record.tokens for record in broken)
    report = outcome.report
    assert report.completed_requests + len(broken) == report.num_requests
    assert report.rejected_requests + report.failed_requests == len(broken) > 3
    assert report.num_requests + report.unsent_requests == 40


# -- the ledger detects errors


async def test_an_undisturbed_engine_gives_the_expected_answers() -> None:
    trace, ledger = conversation_load(30, Random(1)), Ledger(LETTERS)
    async with as_engine(MockEngine(token_ids=LETTERS)) as engine:
        for due in Schedule.closed_loop(trace, 30).take_due(0.0):
            async with await (ledger >> engine).generate(request_of(due)) as stream:
                assert [item async for item in stream]
    assert len(ledger.records) > 5
    assert [problem for record in ledger.records.values() for problem in record.problems()] == []
    assert len({tuple(record.tokens) for record in ledger.records.values()}) == len(ledger.records)


class Spoil(Operator[Any, Any, Any, Any]):
    """Spoil the third item with tokens of each answer: lose, double or alter it, or end there."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        stream = await next.generate(request)
        return ResponseStream(self._spoiled(stream), request, stream)

    async def _spoiled(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        at = 0
        async with stream:
            async for item in stream:
                at += bool(item.data and item.data.token_ids)
                if at != 3 or self.how == "nothing":
                    yield item
                elif self.how == "doubles":
                    yield item
                    yield Annotated(LLMEngineOutput(list(item.data.token_ids)))
                    at += 1
                elif self.how == "alters":
                    item.data.token_ids = [item.data.token_ids[0] % 26 + 97]
                    yield item
                    at += 1
                elif self.how == "ends early":
                    return
                else:
                    at += 1  # loses it


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("nothing", ""),
        ("loses", "token 2 of 6 is wrong, 5 were delivered; 5 tokens of 6"),
        ("doubles", "token 3 of 6 is wrong, 7 were delivered; 7 tokens of 6"),
        ("alters", "token 2 of 6 is wrong, 6 were delivered"),
        ("ends early", "it ended without an error and with []"),
    ],
)
async def test_the_ledger_names_what_is_wrong_with_an_answer(how: str, problem: str) -> None:
    ledger = Ledger(LETTERS)
    async with as_engine(MockEngine(token_ids=LETTERS)) as engine:
        payload = PreprocessedRequest(token_ids=[1, 2, 3], model="m")
        payload.stop_conditions.max_tokens = 6
        async with await (ledger >> Spoil(how) >> engine).generate(Context(payload, id="r")) as stream:
            assert [item async for item in stream]
    assert "; ".join(ledger.records["r"].problems()) == problem


def test_the_ledger_names_what_is_wrong_with_an_end() -> None:
    def problems(**changed: Any) -> list[str]:
        right: dict[str, Any] = {"finishes": ["length"], "usage": CompletionUsage.of(3, 0), "ended_s": 1.0}
        return AnswerRecord(1, 3, 4, 5, 0, LETTERS, **right | changed).problems()

    assert problems() == []
    assert problems(ended_s=None) == ["it has not ended"]
    assert problems(is_late=True) == ["tokens came after the end"]
    assert problems(usage=CompletionUsage.of(4, 0)) == ["the usage is (4, 0), not (3, 0)"]
    assert problems(usage=None) == ["the usage is None, not (3, 0)"]
    assert problems(finishes=["length", "length"]) == ["it ended without an error and with ['length', 'length']"]
    assert problems(finishes=["stop"]) == ["it ended without an error and with ['stop']"]
    assert problems(error=Unavailable("none")) == ["it failed and has ['length']"]
    assert problems(error=Unavailable("none"), finishes=[]) == []


async def test_a_request_that_is_sent_twice_or_left_open_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more request, with the name of one of the trace, is sent beside the replay and never read to its end."""
    trace = conversation_load(4, Random(5))
    name = trace.sessions[-1].turns[-1].name
    generate, held = Ledger.generate, list[Any]()

    async def also_another(self: Ledger, request: Context[PreprocessedRequest], next: Any) -> Any:
        if not held:
            payload = PreprocessedRequest(token_ids=[7] * 640, model="m")
            payload.stop_conditions.max_tokens = 1_000_000
            held.append(await generate(self, Context(payload, id=name), next))
            await anext(held[0])
        return await generate(self, request, next)

    monkeypatch.setattr(Ledger, "generate", also_another)
    monkeypatch.setattr("benchmarks.chaos.SETTLES_S", 2.0)
    outcome = await chaos(chaos_config(1, 1, seed=1), trace, [])
    await held[0].aclose()
    text = "\n".join(outcome.problems)
    assert f"{name}: was sent twice" in text
    for what in ("bookings of the decode router: 1", "active blocks of", "live sequences of", "requests served by"):
        assert what in text
