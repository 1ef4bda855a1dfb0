"""Replays whose engines run ahead give the reports of those that go step by step, byte for byte."""

from __future__ import annotations

from array import array
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import numpy
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import SnapshotPublisher
from engines.mocker import rank
from engines.mocker.build import make_scheduler
from engines.ready_tokens import ReadyTokens
from operators.kv import KvRouterConfig, PlacementRule
from pipeline.protocols.kv import PassRates
from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig
from serving.replay import Prompt, Session, SyntheticLoad, Trace, Turn, parse_faults, run_config

BLOCK_TOKENS = 16
ROUTERS: dict[str, dict[str, Any]] = {
    "round robin": {"router": "round-robin"},
    "random": {"router": "random"},
    "least loaded": {"router": "least-loaded"},
    "kv": {"router": "kv"},
    "kv by expected delay": {"router": "kv", "kv_router": KvRouterConfig(router_placement="expected_delay")},
    "kv by marginal delay": {"router": "kv", "kv_router": KvRouterConfig(router_placement="marginal_delay")},
    "kv with a queue": {"router": "kv", "kv_router": KvRouterConfig(router_queue_threshold=0.3)},
    "kv with output blocks": {"router": "kv", "kv_router": KvRouterConfig(router_track_output_blocks=True)},
}
SCRIPTS: tuple[tuple[str, ...], ...] = (
    (),
    ("worker 0 dies at 0.3 s, returns at 0.7 s",),
    ("worker 1 leaves at 0.2 s, returns at 0.5 s", "worker 0 dies at 0.9 s"),
    ("all restart at 0.25 s, every 150 ms, down 50 ms",),
)
POOLS: tuple[dict[str, Any], ...] = (
    {},
    {"prefill_workers": 2},
    {"prefill_workers": 1, "engine_args": {"bootstrap_port": "9000"}},
    {"prefill_workers": 1, "engine_args": {"kv_bytes_per_token": "131072", "kv_transfer_bandwidth": "10"}},
)
ENGINES: tuple[dict[str, str], ...] = (
    {},
    {"engine_type": "sglang"},
    {"engine_type": "trtllm"},
    {"dp_size": "2"},
    {"aic_nextn": "2"},
    {"num_gpu_blocks": "40"},
    {"num_gpu_blocks": "40", "preemption_mode": "fifo"},
    {"num_gpu_blocks": "40", "engine_type": "sglang"},
    {"max_num_seqs": "2"},
    {"max_num_batched_tokens": "32"},
    {"enable_prefix_caching": "false"},
    {"speedup_ratio": "7"},
    {"speedup_ratio": "0"},
    {"startup_time": "0.05"},
)


def round_times(folder: Path, step_ms: float) -> dict[str, str]:
    """Return the arguments of an engine whose steps take whole multiples of a time, as arrivals are too: many events
    coincide, exactly or but for the rounding of a clock in seconds."""
    path = folder / f"steps of {step_ms} ms.npz"
    if not path.exists():
        numpy.savez(
            path,
            prefill_isl=[1.0, 1e6],
            prefill_ttft_ms=[2 * step_ms] * 2,
            decode_active_kv_tokens=[0.0, 1e6],
            decode_context_length=[0.0, 1e6],
            decode_itl=[[step_ms] * 2] * 2,
        )
    return {"planner_profile_data": str(path)}


def trace_of(rng: Random, count: int, step_ms: float) -> Trace:
    """Return sessions of one to three turns whose arrivals, lengths and prefixes often coincide."""
    sessions = []
    for number in range(count):
        turns = []
        for index in range(rng.choice((1, 1, 1, 2, 3))):
            ids = array("I", [rng.randrange(3), *(rng.randrange(10_000) for _ in range(rng.randrange(4)))])
            prompt = Prompt.of(ids, BLOCK_TOKENS, rng.randrange(1, len(ids) * BLOCK_TOKENS + 1))
            delay_ms = rng.choice((0.0, step_ms, 5 * step_ms))
            turns.append(Turn(f"{number}:{index}", 0, prompt, rng.choice((0, 1, 2, 16, 16, 40, 150)), delay_ms))
        sessions.append(
            Session(str(number), tuple(turns), rng.choice((0.0, rng.randrange(60) * step_ms, rng.uniform(0, 600))))
        )
    return Trace(tuple(sessions))


def report_of(step_by_step: bool, config: GraphConfig, trace: Trace, **how: Any) -> bytes:
    main = partial(run_config, config, trace, per_request=True, step_by_step=step_by_step, **how)
    return run_in_virtual_time(main, backend="asyncio").to_json()


def assert_same(config: GraphConfig, trace: Trace, **how: Any) -> None:
    assert report_of(False, config, trace, **how) == report_of(True, config, trace, **how)


def random_case(folder: Path, seed: int) -> tuple[GraphConfig, Trace, dict[str, Any]]:
    rng = Random(seed)
    pool, step_ms, is_round = rng.choice(POOLS), rng.choice((10.0, 7.8125)), rng.random() < 0.5
    engine_args = {"block_size": str(BLOCK_TOKENS)} | rng.choice(ENGINES) | pool.get("engine_args", {})
    if is_round:
        engine_args |= round_times(folder, step_ms)
    if engine_args.get("engine_type") == "sglang":
        del engine_args["block_size"]
        engine_args["sglang"] = '{"page_size": 16}'
    given: dict[str, Any] = {"engine": "mocker", "workers": rng.choice((2, 3, 4)), "seed": 7}
    given |= rng.choice(list(ROUTERS.values())) | pool | {"engine_args": engine_args}
    how: dict[str, Any] = {"faults": parse_faults(rng.choice(SCRIPTS)), "speed_up": rng.choice((1.0, 1.0, 3.0))}
    if rng.random() < 0.4:
        how["sessions_at_a_time"] = rng.choice((1, 3, 8))
    if rng.random() < 0.2:
        how["stop_when"] = partial(anyio.sleep, rng.uniform(0.1, 1.5))
    return GraphConfig(**given), trace_of(rng, rng.choice((1, 8, 30)), step_ms), how


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_any_replay_has_the_report_of_its_steps(profiles: Path, seed: int) -> None:
    config, trace, how = random_case(profiles, seed)
    assert_same(config, trace, **how)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_many_replays_have_the_reports_of_their_steps(profiles: Path, seed: int) -> None:
    config, trace, how = random_case(profiles, seed)
    assert_same(config, trace, **how)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("sessions", [None, 4])
def test_workers_in_lockstep_have_the_report_of_their_steps(router: str, sessions: int | None) -> None:
    """Equal requests at the same time: all that happens coincides with the same on other workers."""
    load = SyntheticLoad(input_tokens=64, output_tokens=60, request_count=24, arrival_interval_ms=0.0, turns=2).make()
    config = GraphConfig(engine="mocker", workers=4, engine_args={"block_size": "16"}, seed=7, **ROUTERS[router])
    assert_same(config, load, sessions_at_a_time=sessions)


@pytest.mark.parametrize("placement", ["expected_delay", "marginal_delay"])
def test_by_what_workers_report_of_their_passes_a_replay_has_the_report_of_its_steps(
    placement: PlacementRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second worker is twice as fast, which the router learns from what it reports."""
    made, reported, rng = [0], list[Any](), Random(4)
    publish_rates = SnapshotPublisher.publish_rates

    def make_uneven(args: Any, **more: Any) -> Any:
        made[0] += 1
        return make_scheduler(evolve(args, speedup_ratio=1.0 + made[0] % 2), **more)

    def noted(publisher: SnapshotPublisher, rank: int, rates: PassRates) -> None:
        reported.append(rates)
        publish_rates(publisher, rank, rates)

    monkeypatch.setattr(rank, "make_scheduler", make_uneven)
    monkeypatch.setattr(SnapshotPublisher, "publish_rates", noted)
    sessions = []
    for number in range(240):
        ids = array("I", [10 * number + block for block in range(rng.randrange(1, 60))])
        turn = Turn(f"{number}", 0, Prompt.of(ids, BLOCK_TOKENS, len(ids) * BLOCK_TOKENS), rng.randrange(1, 120))
        sessions.append(Session(str(number), (turn,), rng.uniform(0, 15_000)))
    router = KvRouterConfig(router_placement=placement)
    config = GraphConfig(
        engine="mocker", workers=2, engine_args={"block_size": "16"}, seed=7, router="kv", kv_router=router
    )
    how = {"faults": parse_faults(("worker 0 leaves at 9 s, returns at 10 s",))}
    reports = []
    for step_by_step in (False, True):
        made[0] = 0
        reports.append(report_of(step_by_step, config, Trace(tuple(sessions)), **how))
    assert reports[0] == reports[1]
    ahead, steps = reported[: len(reported) // 2], reported[len(reported) // 2 :]
    assert ahead == steps
    prompts = [rates.prompt_token_ps for rates in ahead if rates.prompt_token_ps]
    assert max(prompts) > 1.5 * min(prompts)


def plain(**more: Any) -> tuple[GraphConfig, Trace]:
    given: dict[str, Any] = {"engine": "mocker", "workers": 2, "engine_args": {"block_size": "64"}, "seed": 7} | more
    load = SyntheticLoad(input_tokens=100, output_tokens=300, request_count=6, arrival_interval_ms=400.0)
    return GraphConfig(**given), load.make()


def deliveries(config: GraphConfig, trace: Trace, monkeypatch: pytest.MonkeyPatch, **how: Any) -> int:
    """Return in how many pieces the engines of a replay gave their answers."""
    count = 0
    put = ReadyTokens.put

    def counted(channel: ReadyTokens[Any, Any], *given: Any, **how: Any) -> None:
        nonlocal count
        count += 1
        put(channel, *given, **how)

    monkeypatch.setattr(ReadyTokens, "put", counted)
    report_of(False, config, trace, **how)
    return count


def test_a_stretch_of_decoding_is_delivered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 answers of 300 tokens, the first token and all others."""
    config, trace = plain()
    assert deliveries(config, trace, monkeypatch) == 12


@pytest.mark.parametrize(
    "prevented",
    [
        {"environment": {"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "30"}},
        {"router": "kv", "kv_router": KvRouterConfig(router_track_output_blocks=True)},
    ],
    ids=["silence", "output blocks"],
)
def test_where_a_router_acts_on_tokens_each_comes_by_itself(
    prevented: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"environment": prevented.pop("environment")} if "environment" in prevented else {}
    config, trace = plain(**prevented)
    assert deliveries(config, trace, monkeypatch, **how) == 1800


async def test_on_either_loop_a_replay_that_may_run_ahead_counts_the_same() -> None:
    config, trace = plain()
    ahead = await run_config(config, trace)
    steps = await run_config(config, trace, step_by_step=True)
    for name in ("completed_requests", "total_output_tokens", "total_input_tokens", "prefix_cache_reused_ratio"):
        assert getattr(ahead, name) == getattr(steps, name)
    assert ahead.itl.mean == pytest.approx(steps.itl.mean, rel=1e-6)


def test_an_interrupted_replay_has_every_token_until_then() -> None:
    config, trace = plain()
    for wait_s in (0.3, 0.7001, 1.9):
        assert_same(config, trace, stop_when=partial(anyio.sleep, wait_s))


def test_tokens_until_a_death_are_kept_for_the_next_worker() -> None:
    config, trace = plain()
    script = parse_faults(["worker 0 dies at 1.234 s, returns at 1.5 s", "worker 1 dies at 2.1 s"])
    assert_same(config, trace, faults=script)
