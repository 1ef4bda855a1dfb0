"""The runs of a sweep."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import KvRouterConfig
from pipeline import InvalidArgument
from serving.deployment import GraphConfig
from serving.replay import SweepRun, SyntheticLoad, sweep_runs

Vary = dict[str, list[Any]]
MOCKER = GraphConfig(engine="mocker")
LOAD = SyntheticLoad(input_tokens=100, output_tokens=5, request_count=3)


def names(vary: Vary, **more: Any) -> list[str]:
    return [run.name for run in sweep_runs(MOCKER, vary, **more)]


def test_a_setting_of_another_router_does_not_multiply_runs() -> None:
    vary: Vary = {"router": ["round-robin", "kv"], "workers": [1, 8], "overlap_score_credit": ["0.5", "1"]}
    assert names(vary) == [
        "round-robin 1 worker",
        "round-robin 8 workers",
        "kv 1 worker overlap_score_credit=0.5",
        "kv 1 worker overlap_score_credit=1.0",
        "kv 8 workers overlap_score_credit=0.5",
        "kv 8 workers overlap_score_credit=1.0",
    ]


def test_a_setting_of_prefill_workers_does_not_multiply_runs_without_them() -> None:
    vary: Vary = {"router": ["kv"], "prefill_workers": [0, 2], "conditional_disagg_enabled": [False, True]}
    found = names({**vary, "enforce_disagg": [False, True]})
    assert len(found) == 5
    assert found[0] == "0 prefill workers"


def test_a_name_has_the_values_that_vary_and_a_file_name_all_given_ones() -> None:
    (run,) = sweep_runs(MOCKER, {"router": ["kv"], "workers": [4], "block_size": [64]})
    assert (run.name, run.file_name) == ("kv", "router=kv,workers=4,block_size=64.json")
    four, _ = sweep_runs(MOCKER, {"router": ["kv"], "workers": [4, 8], "block_size": [64]})
    assert (four.name, four.file_name) == ("4 workers", run.file_name)
    (alone,) = sweep_runs(MOCKER, {})
    assert (alone.name, alone.file_name) == ("round-robin", "router=round-robin.json")


def test_values_go_where_they_belong() -> None:
    vary: Vary = {
        "router": ["kv"],
        "prefill_workers": ["2"],
        "router_queue_threshold": ["none"],
        "use_kv_events": ["false"],
        "router_queue_policy": ["lcfs"],
        "engine_args.router_queue_policy": ["fcfs"],
        "max_num_seqs": [32],
        "enable_chunked_prefill": [False],
        "active_decode_blocks_threshold": ["0.9"],
        "migration_limit": ["1"],
        "seed": ["7"],
        "speed_up": ["2"],
        "concurrency": ["5"],
        "request_rate": ["0.5"],
    }
    (run,) = sweep_runs(GraphConfig(engine="mocker", engine_args={"block_size": "64"}), vary, load=LOAD)
    config, kv = run.config, run.config.kv_router
    assert (config.router, config.prefill_workers, config.migration_limit, config.seed) == ("kv", 2, 1, 7)
    assert (kv.router_queue_threshold, kv.use_kv_events, kv.router_queue_policy) == (None, False, "lcfs")
    assert config.engine_args == {
        "block_size": "64",
        "router_queue_policy": "fcfs",
        "max_num_seqs": "32",
        "enable_chunked_prefill": "false",
    }
    assert config.busy.active_decode_blocks_threshold == 0.9
    assert (run.speed_up, run.concurrency, run.workers) == (2.0, 5, 3)
    assert run.load is not None
    assert (run.load.request_rate, run.load.seed, run.load.input_tokens) == (0.5, 7, 100)
    assert run.load_label == "seed=7 speed_up=2.0 concurrency=5 request_rate=0.5"


def test_the_common_arguments_may_be_invalid_without_the_varied_ones() -> None:
    common = {"engine": "mocker", "router": "kv", "workers": 1, "kv_router": KvRouterConfig(min_initial_workers=4)}
    assert [run.name for run in sweep_runs(common, {"workers": [4, 8]})] == ["4 workers", "8 workers"]
    with pytest.raises(InvalidArgument, match="2 workers: the router would wait for 4 workers"):
        sweep_runs(common, {"workers": [4, 2]})


@pytest.mark.parametrize(
    ("vary", "field", "words"),
    [
        ({"speed": ["1"]}, "vary.speed", "nothing of that name"),
        ({"workers": []}, "vary.workers", "needs values"),
        ({"workers": "48"}, "vary.workers", "needs values"),
        ({"workers": ["four"]}, "vary.workers", "must be an integer"),
        ({"workers": [4, "4"]}, "vary.workers", "4 is given twice"),
        ({"workers": [4, 0]}, "vary.workers", "0 workers: must be at least 1"),
        ({"router": ["nearest"]}, "vary.router", "must be one of"),
        ({"overlap_score_credit": ["1"]}, "vary.overlap_score_credit", "no run has it"),
        ({"router": ["kv"], "overlap_score_credit": ["-1"]}, "vary.overlap_score_credit", "not below 0"),
        ({"router": ["kv"], "router_queue_policy": ["any"]}, "vary.router_queue_policy", "must be one of"),
        ({"enforce_disagg": [True]}, "vary.enforce_disagg", "no run has it"),
        ({"block_size": ["64", "many"]}, "vary.block_size", "block_size=many: must be an integer"),
        ({"engine_args.volume": ["3"]}, "engine_args.volume", "no such argument"),
        ({"request_rate": ["1"]}, "vary.request_rate", "there is a trace"),
        ({"block_size": ["64"], "engine_args.block_size": ["16"]}, "vary.engine_args.block_size", "once as block_size"),
        ({"engine": ["nowhere:Engine"]}, "vary.engine", "nowhere"),
    ],
)
def test_a_name_that_cannot_vary_is_refused(vary: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        sweep_runs(MOCKER, vary)
    assert caught.value.field == field


def test_file_names_are_safe_different_and_not_too_long() -> None:
    paths = ["/a/b", "/a_b", "../x" * 200, "../x" * 201]
    found = [SweepRun("", {"router": "kv", "path": path}, MOCKER).file_name for path in paths]
    assert len(set(found)) == 4
    assert not any("/" in name or len(name) > 200 for name in found)


axes = st.fixed_dictionaries(
    {
        "router": st.lists(st.sampled_from(["round-robin", "p2c", "kv"]), min_size=1, unique=True),
        "workers": st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
        "router_temperature": st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, unique=True),
        "speed_up": st.lists(st.sampled_from([1.0, 2.0]), min_size=1, unique=True),
    }
)


@given(axes)
def test_each_combination_is_there_once_and_has_names_of_its_own(vary: dict[str, list[Any]]) -> None:
    if "kv" not in vary["router"]:
        vary["router"].append("kv")
    runs: list[SweepRun] = sweep_runs(GraphConfig(), vary)
    plain = len(vary["workers"]) * len(vary["speed_up"])
    assert len(runs) == plain * (len(vary["router"]) - 1 + len(vary["router_temperature"]))
    for what in ("name", "file_name"):
        assert len({getattr(run, what) for run in runs}) == len(runs)
    assert all(run.config.workers == run.parameters["workers"] for run in runs)
    assert pickle.loads(pickle.dumps(runs)) == runs
