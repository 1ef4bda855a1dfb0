"""SglangUpstream on a prefill and a decode server that meet each other, behind a PrefillRouter."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from engines import DisaggregationMode
from engines.adapter import RequestAdapter
from operators.prefill import PrefillError
from pipeline import Context, InvalidArgument, PenstockError
from pipeline.errors import CannotConnect, Disconnected, TransferFailed
from pipeline.protocols import RoutingHints
from tests.engines.upstream.handover_worlds import answer_of, halves, is_cancelled, sglang_of, sglang_world
from tests.engines.upstream.sglang_worlds import FakeSglang, Rooms, fake_sglang, started_sglang
from tests.engines.upstream.worlds import continued, cut, outputs, prompt, sends, tokens_of

PROMPT = [5, 6, 7]
MEETING = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def aborted(code: int) -> Any:
    reason = {"type": "abort", "message": "KVTransferError: out of luck", "status_code": code}
    return sends({"output_ids": [], "meta_info": {"finish_reason": reason, "completion_tokens": 0}})


# -- the way of a request


async def test_both_halves_are_sent_at_the_same_time_and_meet_in_one_room() -> None:
    async with sglang_world(prefill={"prefill_s": 1.0}) as halved:
        found = list[Any]()
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                found.extend(await answer_of(halved.graph, prompt(9)))

            tasks.start_soon(ask)
            await anyio.sleep(0.5)
            assert halved.running == (1, 1)  # the prompt is not computed yet
        (asked,), (answered,) = (one.requests("/generate") for one in (halved.prefill, halved.decode))
    assert tokens_of(found) == continued(PROMPT, 9)
    assert [asked.json[name] for name in MEETING] == [answered.json[name] for name in MEETING]
    assert (asked.json["bootstrap_host"], asked.json["bootstrap_port"]) == ("gpu-1", 8998)
    assert 0 <= asked.json["bootstrap_room"] < 2**63
    assert asked.json["input_ids"] == answered.json["input_ids"] == PROMPT
    assert asked.json["sampling_params"]["max_new_tokens"] == 1
    assert answered.json["sampling_params"]["max_new_tokens"] == 9


async def test_the_rank_of_the_prefill_is_found_by_the_room_and_by_its_name() -> None:
    async with sglang_world(prefill={"info": {"dp_size": 4}}, decode={"info": {"dp_size": 2}}) as halved:
        routing = RoutingHints(prefill_worker_id=1, prefill_dp_rank=3, dp_rank=1)
        await answer_of(halved.graph, prompt(2, routing=routing))
        (asked,), (answered,) = (one.requests("/generate") for one in (halved.prefill, halved.decode))
    assert asked.json["routed_dp_rank"] == 3
    assert asked.json["bootstrap_room"] % 4 == 3
    assert (answered.json["routed_dp_rank"], answered.json["disagg_prefill_dp_rank"]) == (1, 3)


async def test_a_prefill_server_advertises_where_it_is_met_and_that_it_may_be_stopped() -> None:
    async with fake_sglang(mode="prefill") as fake, started_sglang(fake) as engine:
        config = await engine.start(1)
        assert (config.bootstrap_host, config.bootstrap_port, config.stops_prefills) == ("gpu-1", 8998, True)
    async with fake_sglang(mode="decode") as fake, started_sglang(fake) as engine:
        config = await engine.start(1)
        assert (config.bootstrap_host, config.bootstrap_port, config.stops_prefills) == (None, None, False)


@pytest.mark.parametrize("mode", [DisaggregationMode.PREFILL, DisaggregationMode.DECODE])
async def test_a_probe_of_one_server_needs_no_other(mode: DisaggregationMode) -> None:
    async with fake_sglang(mode=mode.value) as fake, started_sglang(fake) as engine:
        request = Context(prompt(2, is_probe=True))
        async with await RequestAdapter(engine, mode=mode).generate(request) as stream:
            assert [item.error async for item in stream if item.error is not None] == []
        assert fake.requests("/generate")[0].json["bootstrap_host"] == "2.2.2.2"


async def test_a_request_without_a_place_to_meet_is_refused() -> None:
    async with fake_sglang(mode="decode") as fake, started_sglang(fake) as engine:
        with pytest.raises(InvalidArgument):
            await outputs(engine, prompt(2))


# -- one half fails, the other is cancelled


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (sends({"error": {"message": "no", "code": 400}}), InvalidArgument),
        (aborted(500), TransferFailed),
        (cut, Disconnected),
    ],
)
async def test_decode_is_cancelled_if_its_prefill_fails(fault: Any, error: type[PenstockError]) -> None:
    async with sglang_world(prefill={"faults": {0: fault}}, decode_patience_s=1.0) as halved:
        # The other half would wait much longer by itself.
        halved.prefill.prefill_s, halved.decode.transfer_timeout_s = 0.0, 300.0
        halved.prefill.rooms = {}  # they do not meet
        halved.prefill.transfer_timeout_s = 0.1
        began_s = anyio.current_time()
        with pytest.raises(PrefillError) as failed:
            await answer_of(halved.graph, prompt(5))
        await anyio.sleep(0.5)
        assert halved.running == (0, 0)
        assert anyio.current_time() - began_s < 5
    assert isinstance(failed.value.__cause__, PenstockError)
    assert any(isinstance(link, error) for link in _chain(failed.value))


def _chain(error: BaseException) -> list[BaseException]:
    links, link = list[BaseException](), error
    while link is not None:
        links.append(link)
        link = link.__cause__  # type: ignore[assignment]
    return links


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (sends({"error": {"message": "no", "code": 400}}), InvalidArgument),
        (sends({"error": {"message": "full", "code": 503}}), PenstockError),
        (aborted(500), TransferFailed),
        (cut, Disconnected),
    ],
)
async def test_prefill_is_cancelled_if_its_decode_fails(fault: Any, error: type[PenstockError]) -> None:
    async with sglang_world(decode={"faults": {0: fault}}, decode_patience_s=1.0) as halved:
        halved.decode.rooms, halved.decode.transfer_timeout_s = {}, 0.1  # they do not meet
        began_s = anyio.current_time()
        with pytest.raises(error):
            await answer_of(halved.graph, prompt(5))
        await anyio.sleep(0.5)
        assert halved.running == (0, 0)
        assert anyio.current_time() - began_s < 5


async def test_a_decode_server_that_dies_takes_its_prefill_along_and_another_goes_on() -> None:
    rooms: Rooms = {}
    async with (
        fake_sglang(mode="prefill", rooms=rooms) as prefill,
        fake_sglang(mode="decode", rooms=rooms) as one,
        fake_sglang(mode="decode", rooms=rooms) as two,
    ):
        with pytest.raises(ExceptionGroup) as ended:
            await _killed_in_mid_answer(prefill, one, two)
        assert prefill.running == {}
    assert ended.group_contains((CannotConnect, Disconnected))  # the watch of the dead server ends its engine


async def _killed_in_mid_answer(prefill: FakeSglang, one: FakeSglang, two: FakeSglang) -> None:
    engines = [sglang_of(prefill, 1)], [sglang_of(one, 2), sglang_of(two, 3)]
    async with halves([*engines[0]], [*engines[1]], migrations=3) as graph:
        async with anyio.create_task_group() as tasks:

            async def die() -> None:
                await anyio.sleep(0.2)
                (one if one.running else two).kill()

            tasks.start_soon(die)
            assert tokens_of(await answer_of(graph.graph, prompt(40))) == continued(PROMPT, 40)
        assert prefill.begun == 2
        await anyio.sleep(5)


async def test_halves_that_do_not_come_together_start_again_at_once_with_another_decode() -> None:
    rooms: Rooms = {}
    async with (
        fake_sglang(mode="prefill", rooms=rooms) as prefill,
        fake_sglang(mode="decode", rooms={}, faults={0: aborted(500)}, transfer_timeout_s=0.1) as broken,
        fake_sglang(mode="decode", rooms=rooms) as good,
        halves([sglang_of(prefill, 1)], [sglang_of(broken, 2), sglang_of(good, 3)], migrations=3) as graph,
    ):
        began_s = anyio.current_time()
        for _ in range(4):
            assert tokens_of(await answer_of(graph.graph, prompt(5))) == continued(PROMPT, 5)
        await anyio.sleep(0.5)
        assert broken.begun > 0
        assert (len(prefill.running), len(broken.running), len(good.running)) == (0, 0, 0)
        assert anyio.current_time() - began_s < 5


# -- stop and kill


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("after_s", [0.5, 1.5])
async def test_a_client_that_leaves_frees_both_servers(how: str, after_s: float) -> None:
    async with sglang_world(prefill={"prefill_s": 1.0}, decode={"token_s": 0.1}) as halved:
        context, found = Context(prompt(500)), list[Any]()
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                found.extend(await answer_of(halved.graph, context))

            tasks.start_soon(ask)
            await anyio.sleep(after_s)
            getattr(context, how)()
            await anyio.sleep(0.2)
            assert halved.running == (0, 0)
    assert is_cancelled(found) if how == "stop" else not is_cancelled(found)
