"""Running a sweep in this process: order, failures, and reports that are kept in a folder and reused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline import InvalidArgument
from pipeline.testing import run_in_virtual_time
from serving.deployment import GraphConfig
from serving.replay import Limits, Report, SyntheticLoad, parse_faults, run_config, sweep, sweep_runs
from serving.replay.sweeping import ReportsFolder, SweepResult, error_text
from serving.replay.sweeping import run as sweeping

MOCKER = GraphConfig(engine="mocker", seed=3)
TRACE = SyntheticLoad(input_tokens=300, output_tokens=4, request_count=6, arrival_interval_ms=50).make()
OTHER: dict[str, Any] = {"environment": {"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "1"}}
VARY: dict[str, list[Any]] = {"router": ["round-robin", "random"], "workers": [1, 2]}
RUNS = sweep_runs(MOCKER, VARY)


def here(*arguments: Any, **how: Any) -> Sequence[SweepResult]:
    return sweep(*arguments, jobs=1, **how).results


def reports(results: Sequence[SweepResult]) -> list[bytes]:
    return [result.report.to_json() for result in results if result.report is not None]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One that cannot start."""
    (tmp_path / "swept_engine.py").write_text(
        "from engines import EchoEngine\n"
        "class Lame(EchoEngine):\n"
        "    async def start(self, worker_id):\n"
        "        raise OSError('no such card')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "swept_engine:Lame"


def test_each_report_is_that_of_the_run_alone() -> None:
    limits = Limits(ttft_ms=100)
    results = here(RUNS, TRACE, faults=["worker 0 dies at 0.1, returns at 0.2"], limits=limits, trace_name="t.jsonl")
    assert [result.run for result in results] == RUNS
    last = results[-1].report
    assert last is not None
    assert last.settings["trace"] == "t.jsonl"
    assert last.settings["limits"] == {"ttft_ms": 100}
    faults = parse_faults(["worker 0 dies at 0.1, returns at 0.2"])
    alone = partial(run_config, RUNS[-1].config, TRACE, faults=faults, limits=limits, settings=last.settings)
    assert run_in_virtual_time(alone, backend="asyncio").to_json() == last.to_json()


def test_in_processes_the_longest_runs_begin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes then end at about the same time; the results are in the order of the runs."""
    load = SyntheticLoad(input_tokens=100, output_tokens=2, request_count=3)
    runs = sweep_runs(MOCKER, {"router": ["random", "kv"], "request_count": [2, 4, 3]}, load=load)
    begun: list[str] = []

    def run_here(work: Any, shared: Any, tasks: Any, jobs: int, on_progress: Any, on_result: Any) -> None:
        for at, task in enumerate(tasks):
            begun.append(task.run.name)
            on_result(at, work(shared, task, lambda count: None), None)

    monkeypatch.setattr(sweeping, "run_in_processes", run_here)
    done = sweep(runs, jobs=2)
    assert begun == [
        *("kv request_count=4", "kv request_count=3", "random request_count=4", "kv request_count=2"),
        *("random request_count=3", "random request_count=2"),
    ]
    assert [result.run for result in done.results] == runs
    assert [one.report.num_requests for one in done.results if one.report is not None] == [2, 4, 3, 2, 4, 3]


def test_settings_contain_every_difference() -> None:
    """Settings of a router are only in its own runs; another trace of the same name is another load."""
    vary: dict[str, list[Any]] = {"router": ["random", "kv"], "overlap_score_credit": [0.5]}
    plain, kv = here(sweep_runs(MOCKER, vary, concurrency=2), TRACE)
    assert plain.report is not None
    assert kv.report is not None
    assert "router_config" not in plain.report.settings
    assert kv.report.settings["router_config"] == {"overlap_score_credit": 0.5}
    assert (kv.report.settings["concurrency"], kv.report.settings["workers"]) == (2, 1)
    other = SyntheticLoad(input_tokens=301, output_tokens=4, request_count=6, arrival_interval_ms=50).make()
    (of_other,) = here(RUNS[:1], other)
    assert of_other.report is not None
    assert of_other.report.settings["load_digest"] != kv.report.settings["load_digest"]
    assert plain.report.settings["load_digest"] == kv.report.settings["load_digest"]


def test_a_run_that_fails_is_named_and_the_others_continue(engine: str) -> None:
    runs = sweep_runs(MOCKER, {"engine": [engine, "mocker"]})
    received: list[SweepResult] = []
    lame, right = here(runs, TRACE, on_result=received.append)
    assert (lame.report, lame.problem) == (None, "no such card")
    assert right.report is not None
    assert right.report.completed_requests == 6
    assert received == [lame, right]


def test_load_is_made_for_each_run_and_all_requests_are_counted() -> None:
    load = SyntheticLoad(input_tokens=100, output_tokens=2, request_count=3, turns=2)
    runs = sweep_runs(MOCKER, {"request_count": [2, 3], "workers": [1, 2]}, load=load)
    counts: list[tuple[int, int]] = []
    results = here(runs, on_progress=lambda *count: counts.append(count))
    assert [one.report.num_requests for one in results if one.report is not None] == [4, 4, 6, 6]
    assert counts[-1] == (20, 20)
    assert [ended for ended, _ in counts] == sorted(ended for ended, _ in counts)


def test_reports_of_the_same_settings_in_the_folder_are_reused(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    first = here(RUNS, TRACE, folder=folder)
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == sorted(run.file_name for run in RUNS)
    written = {path: path.read_bytes() for path in files}
    assert written[folder / RUNS[0].file_name] == reports(first)[0]
    files[0].unlink()
    files[1].write_text("{}")
    again = here(RUNS, TRACE, folder=folder)
    assert sum(result.is_found for result in again) == 2
    assert reports(again) == reports(first)
    assert {path: path.read_bytes() for path in sorted(folder.iterdir())} == written


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (GraphConfig(engine="mocker", seed=4), {}),
        (GraphConfig(engine="mocker", seed=3, migration_limit=0), {}),
        (MOCKER, {"limits": Limits(ttft_ms=5)}),
        (MOCKER, {"faults": ["worker 0 leaves at 9"]}),
        (MOCKER, {"interval_ms": 500.0}),
        (MOCKER, {"gpus_per_worker": 2}),
        (MOCKER, {"trace_name": "other.jsonl"}),
        (MOCKER, {"per_request": True}),
        (MOCKER, OTHER),
    ],
)
def test_a_report_of_other_settings_is_replaced(config: GraphConfig, how: dict[str, Any], tmp_path: Path) -> None:
    here(sweep_runs(MOCKER, {}), TRACE, folder=tmp_path)
    (other,) = here(sweep_runs(config, {}), TRACE, folder=tmp_path, **how)
    assert not other.is_found
    (same,) = here(sweep_runs(config, {}), TRACE, folder=tmp_path, **how)
    assert same.is_found


def test_single_requests_are_in_the_files_only(tmp_path: Path) -> None:
    (result,) = here(RUNS[:1], TRACE, folder=tmp_path, per_request=True)
    assert result.report is not None
    assert result.report.per_request is None
    assert len(json.loads((tmp_path / RUNS[0].file_name).read_bytes())["per_request"]) == 6
    assert ReportsFolder(tmp_path).find(RUNS[0].file_name, result.report.settings) is not None


def test_a_script_from_a_file_counts_by_its_content(tmp_path: Path) -> None:
    script = tmp_path / "faults.txt"
    texts = ("worker 0 leaves at 9", "worker 0 leaves at 8", "worker 0 leaves at 8")
    found = []
    for text in texts:
        script.write_text(text)
        (result,) = here(RUNS[:1], TRACE, faults=[f"@{script}"], folder=tmp_path / "reports")
        found.append(result.is_found)
    assert found == [False, False, True]


@pytest.mark.parametrize(
    ("how", "field", "words"),
    [
        ({"faults": ["worker 1 dies at 1"]}, "fault", "round-robin 1 worker: .*no worker 1"),
        ({"jobs": 0}, "jobs", "at least 1"),
        ({"runs": [*RUNS, RUNS[0]]}, "runs", "two runs are called round-robin 1 worker"),
        ({"trace": None}, "trace", "no load of their own"),
        ({"runs": sweep_runs(MOCKER, {"speed_up": [1, 0]})}, "arrival_speedup_ratio", "speed_up=0: .*above 0"),
        ({"runs": sweep_runs(MOCKER, {"concurrency": [0]})}, "replay_concurrency", "at least 1"),
    ],
)
def test_an_invalid_argument_is_refused_before_anything_runs(how: dict[str, Any], field: str, words: str) -> None:
    received: list[SweepResult] = []
    arguments: dict[str, Any] = {"runs": RUNS, "trace": TRACE, "jobs": 1, "on_result": received.append} | how
    with pytest.raises(InvalidArgument, match=words) as caught:
        sweep(**arguments)
    assert caught.value.field == field
    assert received == []


def test_no_runs_give_no_results() -> None:
    assert list(here([], TRACE)) == []


def test_an_error_is_one_line_with_its_class_unless_it_is_a_penstock_error() -> None:
    assert error_text(InvalidArgument("too\nmany")) == "too many"
    assert error_text(KeyError("x")) == "KeyError: 'x'"
    assert error_text(ValueError()) == "ValueError"


@pytest.mark.parametrize(("error", "is_raised"), [(KeyboardInterrupt(), True), (SystemExit("enough"), False)])
def test_an_interrupt_is_no_failure_of_a_run_and_an_exit_is_one(
    error: BaseException, is_raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(sweeping, "run_in_virtual_time", ended)
    if is_raised:
        with pytest.raises(KeyboardInterrupt):
            here(RUNS[:1], TRACE)
    else:
        assert [result.problem for result in here(RUNS[:1], TRACE)] == ["SystemExit: enough"]


def test_all_runs_are_of_the_environment_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of that of the process."""
    monkeypatch.setenv("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", "0")
    trace = SyntheticLoad(input_tokens=300, output_tokens=4, request_count=6, arrival_interval_ms=5).make()
    busy = {"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.0001"}
    (plain,), (refusing,) = (here(RUNS[:1], trace, environment=one) for one in (None, busy))
    assert plain.report is not None
    assert refusing.report is not None
    assert (plain.report.completed_requests, "environment" in plain.report.settings) == (6, False)
    assert refusing.report.rejected_requests > 0
    assert refusing.report.settings["environment"] == busy


def test_a_report_that_is_read_again_is_the_same() -> None:
    (result,) = here(RUNS[:1], TRACE)
    assert result.report is not None
    assert Report.from_json(result.report.to_json()).to_json() == result.report.to_json()
