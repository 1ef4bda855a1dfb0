"""The figures the docs show: Python calls per request, the table of conversations, the picture of a request's way."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal
from xml.etree import ElementTree

import anyio
import pytest
from attrs import evolve

from benchmarks.calls import FEW, MANY, MODES, SIMULATION, Calls, count, count_in, summary
from benchmarks.conversations import Measured, conversations, routers, talk
from benchmarks.placement import (
    BLOCK_TOKENS,
    RULES,
    Figures,
    Load,
    Row,
    agents,
    bursts,
    by_the_better,
    mean_of,
    replay,
    row_text,
    trace_of,
    unshared,
)
from benchmarks.request_path import outline, picture, request_steps
from engines.mocker import MockEngine
from operators.kv import PlacementRule
from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig, RouterName

pytestmark = pytest.mark.slow  # of the benchmarks, not of the product

ROOT = Path(__file__).parents[2]


@cache
def counted(mode: str) -> Calls:
    """The calls of this checkout, counted once for all tests."""
    return count(mode)


@pytest.mark.parametrize("mode", MODES)
def test_parts_sum_up_to_the_calls_of_the_product(mode: str) -> None:
    calls = counted(mode)
    parts = {name: (request, token) for name, request, token in calls.parts()}
    assert min(request for request, _ in parts.values()) >= 0
    request, token = (sum(part[i] for name, part in parts.items() if name != "libraries") for i in (0, 1))
    assert (request, token) == pytest.approx(calls.product)
    # Each stage is entered once a request, some of them once a token.
    assert parts["operators"][0] > parts["operators"][1] > 1
    assert parts[SIMULATION][1] > 1


def test_a_prefill_pool_costs_calls_of_a_request_and_none_of_a_token() -> None:
    alone, pooled = counted("kv").product, counted("kv-prefill").product
    assert pooled[0] > alone[0] + 100
    assert pooled[1] == pytest.approx(alone[1], abs=1)


def test_files_are_those_of_the_packages_and_most_entered_first() -> None:
    files = counted("kv").files(10)
    assert len(files) == 10
    assert all((ROOT / name).is_file() for name, _, _ in files)
    entered = [request + (MANY - FEW) * token for _, request, token in files]
    assert entered == sorted(entered, reverse=True)
    assert entered[0] > entered[-1]


def test_another_checkout_is_counted_alike() -> None:
    here = counted("round-robin")
    there = count_in(ROOT, ["round-robin"])
    assert there["round-robin"].product == pytest.approx(here.product, rel=0.01)
    assert summary({"round-robin": here}, there).row_count == 7


# -- the table of conversations


SEED = 5


def run(router: RouterName, backend: Literal["asyncio", "trio"] = "asyncio") -> Measured:
    talks = conversations(24, Random(SEED))
    arguments = {"num_gpu_blocks": "2048"}
    config = GraphConfig(engine="mocker", engine_args=arguments, workers=4, router=router, seed=SEED)
    return run_in_virtual_time(talk, talks, config, backend=backend)


def test_kv_routing_finds_more_of_a_conversation_cached_than_round_robin_and_so_answers_sooner() -> None:
    in_turn, by_cache = run("round-robin"), run("kv")
    assert by_cache.prompt_tokens == in_turn.prompt_tokens
    assert by_cache.cached_tokens > 1.1 * in_turn.cached_tokens
    assert sum(by_cache.first_token_s) < sum(in_turn.first_token_s)


def test_the_same_seed_gives_the_same_figures() -> None:
    assert run("kv") == run("kv")


def test_the_caches_behind_each_router_hold_less_than_half_of_all_tokens() -> None:
    """Otherwise nothing would be evicted, and it would hardly matter which worker gets a request."""
    tokens_in_all = sum(
        len(question) + tokens for one in conversations(200, Random(7)) for question, tokens, _ in one.turns
    )
    for config in routers(4, 7).values():
        held = 0
        for engine in anyio.run(config.make_engines, 4):
            assert isinstance(engine, MockEngine)
            held += engine.args.num_gpu_blocks * engine.args.block_size
        assert tokens_in_all / 4 < held < tokens_in_all / 2


# -- the picture of a request's way


def test_stages_are_nested_as_they_call_each_other() -> None:
    lines = outline(run_in_virtual_time(request_steps, backend="asyncio")).splitlines()
    depths = {line.split()[0]: len(line) - len(line.lstrip()) for line in reversed(lines)}
    order = ["POST", "Preprocess", "Migration", "Detokenize", "PrefillRouter", "prefill", "KvPushRouter", "PushRouter"]
    assert [depths[name] for name in order] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert depths["decode"] == depths["prefill"]


def test_each_step_is_in_a_file_of_the_product_and_ends_after_it_began() -> None:
    for step in run_in_virtual_time(request_steps, backend="asyncio").values():
        assert (ROOT / step.file).is_file(), step
        assert step.end_s >= step.begin_s


def test_the_picture_is_well_formed_and_the_same_in_every_run() -> None:
    one, two = (picture(run_in_virtual_time(request_steps, backend="asyncio")) for _ in range(2))
    assert one == two
    assert "PrefillRouter" in "".join(ElementTree.fromstring(one).itertext())


# -- the loads by which placement rules are compared

MADE: dict[str, Callable[[Random], list[Row]]] = {
    "agents": lambda rng: agents(rng, sessions_per_s=0.5, seconds=20),
    "bursts": lambda rng: bursts(rng, seconds=60),
    "unshared": lambda rng: unshared(rng, per_s=20, seconds=3),
}


@pytest.mark.parametrize("name", MADE)
def test_a_seed_makes_the_same_requests_with_an_id_for_each_block(name: str) -> None:
    rows = MADE[name](Random(SEED))
    assert rows == MADE[name](Random(SEED)) != MADE[name](Random(SEED + 1))
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // BLOCK_TOKENS) for row in rows)
    ids = [hash_id for row in rows for hash_id in row["hash_ids"]]
    assert (len(set(ids)) == len(ids)) is (name != "agents")


def test_the_next_turn_of_an_agent_begins_with_the_whole_blocks_of_the_one_before() -> None:
    for before, after in pairwise(MADE["agents"](Random(SEED))):
        if "delay" in after:
            whole = before["input_length"] // BLOCK_TOKENS
            assert after["session_id"] == before["session_id"]
            assert after["hash_ids"][:whole] == before["hash_ids"][:whole]


@pytest.mark.parametrize("rule", RULES)
def test_a_load_is_replayed_by_each_rule_and_sooner_where_workers_are_faster(rule: PlacementRule) -> None:
    load = Load(2, MADE["unshared"])
    trace = trace_of(load, Path("unread"), SEED)
    even, uneven = (replay(one, trace, rule, SEED) for one in (load, evolve(load, is_uneven=True)))
    assert uneven.per_token < even.per_token
    assert uneven.answer < even.answer
    assert replay(load, trace, rule, SEED) == even  # the workers are even again


def test_a_figure_is_shown_by_the_better_of_two() -> None:
    one, other = Figures(100.0, 400.0, 10.0, 0.0), Figures(50.0, 800.0, 20.0, 0.0)
    mean = mean_of([one, other])
    assert mean == Figures(75.0, 600.0, 15.0, 0.0)
    assert by_the_better(mean, [one, other]) == [1.5, 1.5, 1.5, 1.0]
    assert row_text("cost", one, [1.5]).split() == ["cost", "100.0", "400.0", "10.00", "0", "1.500"]
