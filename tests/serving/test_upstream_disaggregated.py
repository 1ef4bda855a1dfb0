"""The graph in front of servers of which some compute prompts only."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from operators import ModelNotFound, PrefillRouter
from operators.prefill import PrefillNotActivated
from pipeline import Cancelled, InvalidArgument, PenstockError
from pipeline.errors import TransferFailed
from serving.deployment.routing import prefill_stage
from serving.http import app
from tests.engines.upstream.handover_worlds import Blocks, FakeHalf
from tests.engines.upstream.sglang_worlds import FakeSglang, Rooms
from tests.engines.upstream.worlds import continued
from tests.serving.upstream_worlds import ONE, THREE, TWO, Site, request, tokens
from tests.serving.worlds import request_to


def vllm_halves(site: Site) -> tuple[FakeHalf, FakeHalf, Blocks]:
    """A prefill server at ONE and a decode server at TWO."""
    blocks = Blocks()
    return site.add(ONE, FakeHalf, blocks=blocks), site.add(TWO, FakeHalf, blocks=blocks), blocks


def sglang_halves(site: Site) -> tuple[FakeSglang, FakeSglang]:
    rooms: Rooms = {}
    prefill = site.add(ONE, FakeSglang, rooms=rooms, mode="prefill")
    return prefill, site.add(TWO, FakeSglang, rooms=rooms, mode="decode")


def counts(server: FakeHalf) -> tuple[int, int]:
    """How many prompts it computed for others, and how many it answered."""
    sent = [one.json for one in server.requests("/inference/v1/generate") if one.json.get("request_id")]
    return sum(not one["stream"] for one in sent), sum(bool(one["stream"]) for one in sent)


# -- vLLM


@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_vllm_servers_share_each_request_and_keep_no_blocks(site: Site, router: str) -> None:
    prefill, decode, blocks = vllm_halves(site)
    async with site.graph(prefill=(ONE,), router=router) as opened:
        found: dict[int, list[int]] = {}

        async def read(first: int) -> None:
            found[first] = await tokens(opened, request(first, 12))

        async with anyio.create_task_group() as tasks:
            for first in range(1, 9):
                tasks.start_soon(read, first)
        assert found == {first: continued([first, 6, 7], 12) for first in range(1, 9)}
        assert (counts(prefill), counts(decode)) == ((8, 0), (0, 8))
        assert len(blocks.fetched) == 8
        assert blocks.count == 0
        roles = [worker.endpoint.path for worker in (*opened.prefill_workers, *opened.workers)]
        assert roles == ["penstock-tiny/prefill/generate", "penstock-tiny/backend/generate"]


async def test_while_no_prefill_server_is_there_the_others_compute_prompts(site: Site) -> None:
    prefill, decode, blocks = vllm_halves(site)
    prefill.kill()
    async with site.graph(prefill=(ONE,)) as opened:
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        prefill.restart()
        await anyio.sleep(5)
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        assert (counts(prefill), counts(decode)) == ((1, 0), (0, 2))
        prefill.kill()
        await anyio.sleep(3)
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        assert counts(decode) == (0, 3)
        assert blocks.count == 0


async def test_with_enforce_disagg_a_model_is_served_once_it_has_both(site: Site) -> None:
    prefill, decode, _ = vllm_halves(site)
    prefill.kill()
    async with site.graph(prefill=(ONE,), enforce_disagg=True) as opened:
        with pytest.raises(ModelNotFound):
            await tokens(opened, request())
        prefill.restart()
        await anyio.sleep(5)
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        prefill.kill()
        await anyio.sleep(3)
        with pytest.raises(PrefillNotActivated):
            await tokens(opened, request())
        assert counts(decode) == (0, 1)


async def test_requests_that_run_stay_with_their_graph_when_prefill_comes(site: Site) -> None:
    prefill, decode, _ = vllm_halves(site)
    decode.token_s = 0.1
    prefill.kill()
    async with site.graph(prefill=(ONE,)) as opened:
        found: list[list[int]] = []

        async def read() -> None:
            found.append(await tokens(opened, request(5, 60)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(0.5)
            prefill.restart()
        assert found == [continued([5, 6, 7], 60)]
        assert len(opened.prefill_workers) == 1


async def test_a_prefill_server_that_dies_in_mid_prefill_costs_no_answer(site: Site) -> None:
    prefill, decode, _ = vllm_halves(site)
    other = site.add(THREE, FakeHalf, blocks=prefill.blocks)
    for one in (prefill, other):
        one.prefill_s = 2.0
    async with site.graph(prefill=(ONE, THREE)) as opened:
        found: list[list[int]] = []

        async def read(first: int) -> None:
            found.append(await tokens(opened, request(first)))

        async with anyio.create_task_group() as tasks:
            for first in range(4):
                tasks.start_soon(read, first)
            await anyio.sleep(1)
            prefill.kill()
        assert sorted(found) == sorted(continued([first, 6, 7], 5) for first in range(4))
        assert counts(decode)[1] == 4


@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_requests_under_way_at_the_only_prefill_server_go_on_without_it(site: Site, router: str) -> None:
    prefill, decode, blocks = vllm_halves(site)
    prefill.prefill_s = 2.0
    async with site.graph(prefill=(ONE,), router=router) as opened:
        found: dict[int, list[int]] = {}

        async def read(first: int) -> None:
            found[first] = await tokens(opened, request(first))

        async with anyio.create_task_group() as tasks:
            for first in range(8):
                tasks.start_soon(read, first)
            await anyio.sleep(1)
            prefill.kill()
            for first in range(8, 16):  # while it is not known that it is gone
                tasks.start_soon(read, first)
            await anyio.sleep(0.01)
            assert opened.prefill_workers == []
        assert found == {first: continued([first, 6, 7], 5) for first in range(16)}
        assert (counts(prefill)[0], counts(decode)) == (8, (0, 16))
        assert blocks.fetched == []


async def test_with_enforce_disagg_they_end_as_unavailable(site: Site) -> None:
    prefill, decode, _ = vllm_halves(site)
    prefill.prefill_s = 2.0
    async with site.graph(prefill=(ONE,), enforce_disagg=True) as opened, anyio.create_task_group() as tasks:
        found: list[int] = []

        async def read() -> None:
            with pytest.raises(PenstockError) as caught:
                await tokens(opened, request())
            found.append(caught.value.facts.status)

        tasks.start_soon(read)
        await anyio.sleep(1)
        prefill.kill()
        await anyio.sleep(1)
        assert found == [503]
        assert counts(decode) == (0, 0)


async def test_a_prompt_whose_blocks_do_not_come_is_computed_by_the_only_decode_server(site: Site) -> None:
    prefill, decode, blocks = vllm_halves(site)
    decode.fails_transfers = True
    async with site.graph(prefill=(ONE,)) as opened:
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        assert (counts(prefill), counts(decode)) == ((1, 0), (0, 2))
        decode.fails_transfers = False  # what failed once is not held against the next request
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        assert (counts(prefill), len(blocks.fetched)) == ((2, 0), 1)


async def test_with_enforce_disagg_such_a_prompt_ends_with_a_clear_error(site: Site) -> None:
    prefill, decode, _ = vllm_halves(site)
    decode.fails_transfers = True
    async with site.graph(prefill=(ONE,), enforce_disagg=True) as opened:
        with pytest.raises(TransferFailed, match="decode failed before its first token: the transfer failed"):
            await tokens(opened, request())
        assert (counts(prefill), counts(decode)) == ((1, 0), (0, 1))


async def test_a_prefill_server_that_comes_and_goes_at_once_ends_no_service(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the router kv, which needs the card of a prefill server for its stage."""
    prefill, decode, _ = vllm_halves(site)
    prefill.kill()
    is_gone = anyio.Event()

    @asynccontextmanager
    async def late(*arguments: Any) -> AsyncIterator[PrefillRouter]:
        if not is_gone.is_set():
            prefill.kill()
            await anyio.sleep(3)
            is_gone.set()
        async with prefill_stage(*arguments) as stage:
            yield stage

    monkeypatch.setattr("serving.deployment.model_graph.prefill_stage", late)
    async with site.graph(prefill=(ONE,), router="kv") as opened:
        prefill.restart()
        await is_gone.wait()
        for _ in range(40):
            assert await tokens(opened, request()) == continued([5, 6, 7], 5)
            await anyio.sleep(0.1)
        prefill.restart()
        await anyio.sleep(6)
        before = counts(prefill)[0]
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)
        assert (before, counts(prefill)[0], counts(decode)[1]) == (0, 1, 41)


async def test_beside_prefill_servers_the_tokenizer_has_to_be_here(site: Site) -> None:
    vllm_halves(site)
    async with site.graph(prefill=(ONE,), model_path=None) as opened:
        for one in (*opened.supervisors, *opened.prefill_supervisors):
            assert isinstance(one.problem, InvalidArgument)
            assert "the tokenizer of 'tiny' is not on this machine" in one.problem.message


async def test_health_lists_the_servers_of_both_halves_as_they_are_now(site: Site) -> None:
    prefill, _, _ = vllm_halves(site)

    async def roles() -> list[str]:
        return [*(await request_to(app(opened.graph), "/health", method="GET").run()).json["roles"]]

    async with site.graph(prefill=(ONE,)) as opened:
        assert await roles() == ["decode", "prefill"]
        prefill.kill()
        await anyio.sleep(3)
        assert await roles() == ["decode"]


async def test_blocks_of_a_client_that_left_are_fetched_by_a_server_of_their_model(site: Site) -> None:
    """Two models behind one graph share the connector."""
    blocks = Blocks()
    other, prefill, decode = (
        site.add(url, FakeHalf, blocks=blocks, model=model)
        for url, model in ((TWO, "other"), (ONE, "tiny"), (THREE, "tiny"))
    )
    prefill.prefill_s, prefill.answer_s = 1.0, 0.3
    async with site.graph(prefill=(ONE,)) as opened, anyio.create_task_group() as tasks:
        sent = request()

        async def ask() -> None:
            with pytest.raises(Cancelled):
                await tokens(opened, sent)

        tasks.start_soon(ask)
        await anyio.sleep(1.15)
        assert blocks.count == 1
        sent.stop()
        await anyio.sleep(1)
        assert (blocks.count, counts(other), counts(decode)) == (0, (0, 0), (0, 1))


# -- SGLang


async def test_sglang_servers_share_each_request(site: Site) -> None:
    prefill, decode = sglang_halves(site)
    async with site.graph(prefill=(ONE,)) as opened:
        for first in range(1, 4):
            assert await tokens(opened, request(first)) == continued([first, 6, 7], 5)
        assert (prefill.begun, decode.begun) == (3, 3)
        rooms = [[one.json["bootstrap_room"] for one in server.requests("/generate")] for server in (prefill, decode)]
        assert rooms[0] == rooms[1]
        assert len(set(rooms[0])) == 3


async def test_an_sglang_server_that_decodes_is_not_served_without_one_that_prefills(site: Site) -> None:
    prefill, _ = sglang_halves(site)
    prefill.kill()
    async with site.graph(prefill=(ONE,)) as opened:
        service = app(opened.graph)
        assert (await request_to(service, "/health", method="GET").run()).status == 503
        prefill.restart()
        await anyio.sleep(5)
        assert await tokens(opened, request()) == continued([5, 6, 7], 5)


async def test_an_sglang_server_of_the_wrong_half_is_left_out(site: Site) -> None:
    sglang_halves(site)
    async with site.graph(prefill=(TWO,)) as opened:
        problems = [one.problem for one in (*opened.supervisors, *opened.prefill_supervisors)]
        assert all(isinstance(problem, InvalidArgument) for problem in problems)
        assert "was started with --disaggregation-mode prefill, and is to be decode" in str(problems[0])
        assert {getattr(problem, "field", None) for problem in problems} == {"upstream", "prefill_upstream"}


async def test_aggregated_sglang_servers_are_a_pool(site: Site) -> None:
    servers = [site.add(url, FakeSglang) for url in (ONE, TWO)]
    async with site.graph(router="kv") as opened:
        for first in range(1, 5):
            assert await tokens(opened, request(first)) == continued([first, 6, 7], 5)
        assert sum(server.begun for server in servers) == 4


# -- settings


async def test_a_lease_that_cannot_be_is_refused_before_anything_is_opened(site: Site) -> None:
    vllm_halves(site)
    with pytest.raises(InvalidArgument) as caught:
        async with site.graph(prefill=(ONE,), servers={"lease_s": 0.0}):
            pass
    assert caught.value.field == "kv_lease_s"
