"""`penstock replay sweep` as a user starts it; twice in processes, which cost a second each."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.testing import run_in_virtual_time
from serving.cli.progress import sweep_progress
from serving.replay.sweeping import run as sweeping

Sweep = Callable[..., tuple[int, str, str]]
LOAD = ("--input-tokens", "600", "--output-tokens", "4", "--requests", "5", "--request-rate", "20")
GRID = (
    "--router",
    "random",
    "--router",
    "kv",
    "--workers",
    "1",
    "--workers",
    "2",
    "--vary",
    "router-temperature=0,0.5",
)
NAMES = [
    *("random 1 worker", "random 2 workers"),
    *(f"kv {count} router_temperature={value}" for count in ("1 worker", "2 workers") for value in ("0.0", "0.5")),
]


@pytest.fixture
def sweep(replay: Sweep) -> Sweep:
    """A sweep in this process."""
    return lambda *options: replay("sweep", "--jobs", 1, *options)


def rows(out: str) -> list[str]:
    return [name for line in out.splitlines() if (name := line.strip().split("   ")[0]) in NAMES]


def test_every_run_has_a_row_and_is_written(sweep: Sweep, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "sweep.json", "--html", tmp_path / "sweep.html")
    code, out, err = sweep(*LOAD, *GRID, *files)
    assert (code, err) == (0, "")
    assert rows(out) == NAMES
    written = json.loads((tmp_path / "sweep.json").read_bytes())
    assert [run["name"] for run in written] == NAMES
    assert {run["completed_requests"] for run in written} == {5}
    page = (tmp_path / "sweep.html").read_text()
    assert all(name in page for name in NAMES)


def test_a_report_of_a_sweep_is_that_of_a_replay_with_these_options(replay: Sweep, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps(row | {"timestamp": 100 * at}) + "\n" for at in range(8)))
    settings = tmp_path / "kv.toml"
    settings.write_text("overlap_score_credit = 0.5\n")
    common = (trace, "--requests", 6, "--fault", "worker 1 dies at 0.2", "--sla-ttft-ms", 40, "--engine-arg")
    options = (*common, "block_size=64", "--migration-limit", 1, "--seed", 5, "--per-request")
    given = ("--router", "kv", "--workers", 2)
    vary = ("--vary", "overlap_score_credit=0.5", "--vary", "speed-up=2")
    assert replay("sweep", "--jobs", 1, *options, *given, *vary, "--reports", tmp_path / "reports")[0] == 0
    alone = tmp_path / "alone.json"
    how = ("--router-config", settings, "--speed-up", 2, "--json", alone)
    assert replay(*options, *given, *how)[0] == 0
    (found,) = (tmp_path / "reports").iterdir()
    assert found.name == "router=kv,workers=2,overlap_score_credit=0.5,speed_up=2.0.json"
    assert found.read_bytes() == alone.read_bytes()


def test_what_is_made_up_may_vary_without_an_option_of_its_own(sweep: Sweep, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    vary = ("--vary", "input-tokens=50,70", "--vary", "requests=2,3")
    assert sweep("--output-tokens", 3, *vary, "--json", file)[0] == 0
    assert [run["total_input_tokens"] for run in json.loads(file.read_bytes())] == [100, 150, 140, 210]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--vary", "speed"], ["--vary", "NAME=VALUE"]),
        (["--vary", "volume=3"], ["--vary volume", "mocker"]),
        (["--vary", "workers=1,"], ["--vary workers", "empty"]),
        (["--vary", "workers=1,2", "--workers", "3"], ["--vary workers", "twice"]),
        (["--vary", "seed=1", "--vary", "seed=2"], ["--vary seed", "twice"]),
        (["--vary", "router_temperature=1"], ["--vary router_temperature", "router kv"]),
        (["--vary", "max_num_seqs=8,0"], ["--vary max_num_seqs", "max_num_seqs=0"]),
        (["--vary", "request-rate=fast"], ["--vary request_rate", "number"]),
        (["--router-config", "/nowhere.toml"], ["--router-config", "router kv"]),
        (["--router", "nearest"], ["--router", "nearest"]),
        (["--workers", "0"], ["workers", "at least 1"]),
        (
            ["--workers", "2", "--workers", "1", "--fault", "worker 1 dies at 1"],
            ["--fault", "1 worker: ", "no worker 1"],
        ),
        (["--engine-arg", "volume=3"], ["--engine-arg volume"]),
        (["--json", "/nowhere/sweep.json"], ["--json", "/nowhere/sweep.json"]),
        (["--reports", "/nowhere/reports"], ["--reports", "/nowhere/reports"]),
        (["--reports", __file__], ["--reports", "no folder"]),
        (["--jobs", "0"], ["--jobs", "at least 1"]),
        (["--per-request"], ["--per-request", "--reports"]),
        (["--per-request", "--json", "sweep.json"], ["--per-request", "--reports"]),
        (["--skip-bad"], ["--skip-bad", "TRACE"]),
        (["--format", "dynamo"], ["--format", "TRACE"]),
    ],
)
def test_what_is_wrong_is_named_before_anything_runs(options: list[str], words: list[str], sweep: Sweep) -> None:
    code, out, err = sweep(*LOAD, *options)
    assert (code, out) == (2, "")
    last_line = err.strip().splitlines()[-1]
    assert all(word in last_line for word in words), last_line


def test_an_interrupt_shows_what_is_done_and_a_second_call_goes_on(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*LOAD, *GRID, "--json", tmp_path / "sweep.json", "--reports", tmp_path / "reports")
    calls: list[Any] = []

    def interrupted(*arguments: Any, **how: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run_in_virtual_time(*arguments, **how)

    monkeypatch.setattr(sweeping, "run_in_virtual_time", interrupted)
    code, out, err = sweep(*options)
    assert (code, err) == (130, "Interrupted: 2 of 6 runs have ended\n")
    assert rows(out) == NAMES
    assert out.count("not run") == 4
    assert len(json.loads((tmp_path / "sweep.json").read_bytes())) == 2
    code, out, err = sweep(*options)
    assert (code, err) == (0, f"2 of 6 runs were in {tmp_path / 'reports'}\n")
    assert len(calls) == 3 + 4
    assert "not run" not in out


ENGINES = """
import os, time
from engines import EchoEngine

class Dies(EchoEngine):
    async def start(self, worker_id):
        os._exit(7)

class Raises(EchoEngine):
    async def start(self, worker_id):
        raise OSError("no such card")

class Hangs(EchoEngine):
    async def start(self, worker_id):
        time.sleep(60)
"""


AT_TERMINAL = """
import os, signal, sys
os.close(os.open(sys.argv[1], os.O_RDWR))
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, sys.argv[2:])
"""


def command(*options: str | Path) -> list[str]:
    return [sys.executable, "-m", "serving", "replay", "sweep", *LOAD, *map(str, options)]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "swept.py").write_text(ENGINES)
    paths = [str(tmp_path), str(Path(__file__).parents[3])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def test_two_processes_write_what_one_does(sweep: Sweep, tmp_path: Path, environment: dict[str, str]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    names = ("sweep.json", "sweep.html", "reports")

    def files(folder: Path) -> list[str]:
        folder.mkdir()
        return [str(part) for name in names for part in (f"--{name.rpartition('.')[2]}", folder / name)]

    many = ("--router", "random", "--vary", "seed=1,2")
    code, _, _ = sweep(*LOAD, *many, "--vary", "engine=mocker", *files(here))
    assert code == 0
    run = command(*many, "--vary", "engine=mocker", "--jobs", "2", *files(there))
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len([*(here / "reports").iterdir()]) == 2
    for path in (*(here / "reports").iterdir(), here / "sweep.json", here / "sweep.html"):
        assert (there / path.relative_to(here)).read_bytes() == path.read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such terminals")
def test_a_process_takes_only_its_run_along_and_an_interrupt_ends_them_all(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """One dies, one hangs for good; what is done is kept. One that was left would keep the output open.

    The interrupt is that of a terminal, which all processes get. It ends the program also if these tests run in the
    background of a shell, whose programs ignore it.
    """
    folder, temporary = tmp_path / "reports", tmp_path / "temporary"
    temporary.mkdir()
    environment |= {"TMPDIR": str(temporary)}
    run = command("--vary", "engine=swept:Raises,swept:Dies,swept:Hangs,echo", "--jobs", "2", "--reports", folder)
    ours, its = os.openpty()
    run = [sys.executable, "-c", AT_TERMINAL, os.ttyname(its), *run]
    with subprocess.Popen(
        run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        end = time.monotonic() + 50
        while not [*folder.glob("*.json")] and time.monotonic() < end:
            time.sleep(0.05)
        os.write(ours, b"\x03")
        out, err = process.communicate(timeout=20)
    os.close(ours)
    os.close(its)
    assert process.returncode == 130
    assert [*temporary.iterdir()] == []
    *errors, last = err.splitlines()
    assert sorted(errors) == [
        "Error: swept:Dies: its process crashed or was killed",
        "Error: swept:Raises: no such card",
    ]
    assert last == "Interrupted: 3 of 4 runs have ended"
    ends = dict(line.split(maxsplit=2)[:2] for line in out.splitlines() if line.strip().startswith("swept:"))
    assert ends == {"swept:Raises": "failed", "swept:Dies": "failed", "swept:Hangs": "not"}
    assert [path.name for path in folder.iterdir()] == ["router=round-robin,workers=1,engine=echo.json"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_bar_stands_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for file in (Terminal(), io.StringIO()):
        with sweep_progress(2, file) as (heard, run_ended):
            heard(3, 8)
            run_ended()
            heard(8, 8)
            run_ended()
        assert ("2/2 runs" in file.getvalue() and "8/8" in file.getvalue()) is file.isatty()
