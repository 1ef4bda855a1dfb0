"""What real vLLM servers answered with NIXL, handed over by VllmPrefill and VllmDecode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve

from engines.upstream import VllmDecode, kv_connector
from pipeline.errors import (
    TransferFailed,
    blames_worker,
    may_migrate,
)
from pipeline.protocols import (
    PrefillResult,
    PreprocessedRequest,
    StopConditions,
)
from tests.engines.upstream.handover_worlds import (
    FakeHalf,
    answer_of,
    bodies,
    decode_of,
    halves,
    prefill_of,
)
from tests.engines.upstream.worlds import all_running, outputs, running, started_on, tokens_of

RECORD = json.loads((Path(__file__).with_name("recorded") / "vllm_nixl.json").read_text(encoding="utf-8"))


@define(eq=False)
class Recorded(FakeHalf):
    """Answers prompts as vLLM 0.32 has answered."""

    name: str = ""
    """Of the exchange that it was."""

    async def _tokens(self, line: Any, asked: Any) -> None:
        if asked.prompt == [0]:
            await super()._tokens(line, asked)
            return
        (answer,) = (one["answer"] for one in RECORD["exchanges"] if one["name"] == self.name)
        if "json" in answer:
            await line.whole(answer["status"], answer["json"])
            return
        await line.begin()
        for event in answer["events"]:
            await line.event(event)
        await line.end()


async def test_recorded_servers_hand_over_with_every_key_that_prefill_has_sent() -> None:
    prefill, decode, connector = Recorded(name="prefill"), Recorded(name="decode"), kv_connector("nixl")
    first, then = prefill_of(prefill, 1, connector), decode_of(decode, 2, connector)
    async with all_running(prefill, decode), halves([first], [then]) as graph:
        found = await answer_of(graph.graph, recorded_prompt(5))
    exchanges = {one["name"]: one for one in RECORD["exchanges"]}
    sent = bodies(decode)[0]["kv_transfer_params"]
    assert sent == exchanges["prefill"]["answer"]["json"]["kv_transfer_params"]
    assert len(tokens_of(found)) == 5
    assert found[-1].completion_usage is not None
    assert found[-1].completion_usage.prompt_tokens == 300


async def test_a_recorded_decode_without_its_prefill_server_is_a_failed_transfer() -> None:
    name = "decode without its prefill server"
    async with running(Recorded, name=name) as decode, started_on(VllmDecode, decode) as engine:
        params = {"kv_transfer_params": RECORD["exchanges"][0]["answer"]["json"]["kv_transfer_params"]}
        with pytest.raises(TransferFailed) as failed:
            await outputs(engine, evolve(recorded_prompt(5), prefill_result=PrefillResult(params)))
    assert may_migrate(failed.value)
    assert not blames_worker(failed.value)


def recorded_prompt(tokens: int) -> PreprocessedRequest:
    stop = StopConditions(max_tokens=tokens, ignore_eos=True)
    return PreprocessedRequest([*range(300, 600)], model="tiny", stop_conditions=stop)
