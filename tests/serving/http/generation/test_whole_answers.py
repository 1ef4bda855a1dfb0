"""An answer that is not streamed: how much of it may be held."""

from __future__ import annotations

from typing import Any

from pipeline.protocols.output import TopLogprob
from pipeline.testing import ScriptedEngine, watch_streams
from serving.http import HttpOptions, Telemetry, app
from serving.limits import HttpLimits
from tests.serving.worlds import chat, last, token


def limited(engine: Any, limit_bytes: int, telemetry: Telemetry | None = None) -> Any:
    options = HttpOptions(limits=HttpLimits(max_whole_answer_bytes=limit_bytes))
    return app({"m": engine}, options=options, telemetry=telemetry)


async def test_an_answer_that_is_too_long_is_refused_and_its_engine_ended() -> None:
    engine, telemetry = ScriptedEngine(lambda _: [*[token("x" * 100)] * 1000, last()]), Telemetry()
    service = limited(engine, 10_000, telemetry)
    with watch_streams() as streams:
        refused = await chat(service).run()
    assert (refused.status, refused.json["limit"]["name"]) == (400, "max_whole_answer_bytes")
    assert 10_000 < refused.json["limit"]["value"] < 11_000
    assert (engine.open, streams.open) == (0, [])
    assert engine.delivered < 100
    assert 'error_type="validation"' in telemetry.text().decode()
    assert (await chat(service, stream=True).run()).text == "x" * 100_000


async def test_log_probabilities_count_for_what_they_take() -> None:
    top = [[TopLogprob(rank, rank, -1.0, "x") for rank in range(20)]]
    engine = ScriptedEngine(lambda _: [*[token("x", log_probs=[-1.0], top_logprobs=top)] * 100, last()])
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
    assert (await chat(limited(engine, 100 * 20 * 128), **wanted).run()).status == 400
    assert (await chat(limited(engine, 100 * 30 * 128), **wanted).run()).status == 200


async def test_zero_turns_the_limit_off() -> None:
    engine = ScriptedEngine([*[token("x" * 1000)] * 1000, last()])
    answer = await chat(limited(engine, 0)).run()
    assert len(answer.json["choices"][0]["message"]["content"]) == 1_000_000
