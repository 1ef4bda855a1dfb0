"""`penstock replay` as a user starts it: what it prints and writes, and its errors for wrong options."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline import InvalidArgument
from serving.cli import progress as progress_bars
from serving.cli.progress import progress
from serving.replay import Report, Samples, comparison_text, make_report
from serving.replay.report import difference

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * at, "input_length": 600, "output_length": 8, "hash_ids": [at % 3, 100 + at]}
        for at in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_in_real_time_an_interrupt_leaves_a_report_of_what_was_done(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupting(total: int, to: object) -> Iterator[Callable[[int], None]]:
        yield lambda ended: os.kill(os.getpid(), signal.SIGINT) if ended == 4 else None

    monkeypatch.setattr(progress_bars, "progress", interrupting)
    load = ("--input-tokens", 64, "--output-tokens", 4, "--requests", 500, "--arrival-interval-ms", 40)
    file = tmp_path / "report.json"
    code, out, err = replay(*load, "--real-time", "--engine-arg", "speedup_ratio=100", "--json", file)
    assert (code, err) == (130, "")
    assert "INTERRUPTED" in out
    report = json.loads(file.read_bytes())
    assert report["settings"]["interrupted"] is True
    assert report["num_requests"] + report["unsent_requests"] == 500
    assert report["completed_requests"] >= 4
    assert report["unsent_requests"] > 0


def test_the_figures_are_shown_and_written(replay: Replay, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    code, out, err = replay(trace, "--router", "kv", "--workers", "2", "--json", file, "--sla-ttft-ms", "500")
    assert (code, err) == (0, "")
    assert out.startswith("Penstock replay\n")
    assert "12 requests, 12 completed" in out
    report = json.loads(file.read_bytes())
    assert report["mean_ttft_ms"] > 0
    assert report["p99_ttft_ms"] >= report["median_ttft_ms"]
    assert report["mean_tpot_ms"] > 0
    assert 0 <= report["prefix_cache_reused_ratio"] < 1
    assert (report["goodput_completed_requests"], report["per_request"]) == (12, None)
    assert len(report["settings"].pop("load_digest")) == 16
    assert report["settings"] == {
        "trace": "trace.jsonl",
        "format": "mooncake",
        "router": "kv",
        "router_config": {"router_placement": "marginal_delay"},
        "workers": 2,
        "prefill_workers": 0,
        "engine": "mocker",
        "engine_args": {},
        "seed": 42,
        "speed_up": 1.0,
        "concurrency": None,
        "faults": [],
        "limits": {"ttft_ms": 500.0},
    }


def test_two_processes_write_the_same_bytes(trace: Path, tmp_path: Path) -> None:
    """Whatever order a process gives its sets; with chance in the router, deaths, and a prefill pool."""
    faults = ["--fault", "worker 1 dies at 300 ms, returns at 600 ms", "--fault", "prefill 0 dies at 0.5, returns at 1"]
    pools = ["--workers", "3", "--prefill-workers", "2", "--router", "random", "--per-request"]
    written = []
    for seed in ("1", "2"):
        file = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "serving", "replay", str(trace), *pools, *faults, "--json", str(file)]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
        written.append((ended.stdout, file.read_bytes()))
    assert written[0] == written[1]


def test_the_environment_means_what_it_means_for_a_server(
    replay: Replay, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named where it is set, for a sweep too, which does not take up what is of another one."""
    file, folder = tmp_path / "report.json", tmp_path / "reports"
    monkeypatch.setenv("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", " ")  # as if it was not set
    load = (trace, "--speed-up", 100)
    sweep = ("sweep", *load, "--jobs", 1, "--reports", folder)
    reports = []
    for value in (None, "0.0001"):
        if value is not None:
            monkeypatch.setenv("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", value)
        assert replay(*load, "--json", file)[0] == 0
        assert replay(*sweep)[::2] == (0, "")  # nothing is taken up
        assert file.read_bytes() == next(folder.iterdir()).read_bytes()
        reports.append(Report.from_json(file.read_bytes()))
    plain, refusing = reports
    assert (plain.completed_requests, "environment" in plain.settings) == (12, False)
    assert refusing.rejected_requests > 0
    assert refusing.settings["environment"] == {"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.0001"}
    for name, text in (("DYN_API_KEY", "s3cret"), ("DYN_HEALTH_CHECK_PAYLOAD", '{"token": "s3cret"}')):
        monkeypatch.setenv(name, text)
        assert replay(*load, "--json", file)[0] == 0
        assert (name.encode() in file.read_bytes(), b"s3cret" in file.read_bytes()) == (True, False)


def test_the_first_requests_faster_or_so_many_at_a_time(replay: Replay, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    for options, last_ms in ((("--speed-up", "10"), 40.0), (("--concurrency", "5"), 0.0)):
        code, _, _ = replay("run", trace, "--requests", "5", *options, "--per-request", "--json", file)
        report = Report.from_json(file.read_bytes())
        assert report.per_request is not None
        assert (code, len(report.per_request)) == (0, 5)
        assert report.per_request[-1].arrival_time_ms == pytest.approx(last_ms)


def test_load_is_made_up_where_there_is_no_trace(replay: Replay) -> None:
    sizes = ("--input-tokens", "700", "--output-tokens", "5", "--request-count", "6", "--turns", "2")
    code, out, _ = replay(*sizes, "--request-rate", "10", "--engine-arg", "block_size=64")
    assert code == 0
    assert "12 requests, 12 completed; 8,400 input and 60 output tokens" in out


def test_bad_lines_are_left_out_if_wished(replay: Replay, trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 5}\n')
    code, _, err = replay(trace)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("Error: TRACE: ")
    assert "line 13: " in err
    assert "hash_ids" in err
    code, out, _ = replay(trace, "--skip-bad")
    assert code == 0
    assert "1 bad lines left out" in out


def test_the_cost_is_shown_for_the_gpus_and_for_the_machine(replay: Replay, trace: Path, tmp_path: Path) -> None:
    """Section 10.5: wall_time_ms and gpu_hours. How long it took is shown only on request."""
    file, gpus = tmp_path / "report.json", ("--gpus-per-worker", 2, "--gpus-per-prefill-worker", 3)
    code, out, _ = replay(trace, "--workers", 2, "--prefill-workers", 1, *gpus, "--json", file)
    report = json.loads(file.read_bytes())
    assert (code, "replayed in" in out, "wall_time_ms" in report) == (0, False, False)
    wanted = 2 * report["decode_worker_seconds"] + 3 * report["prefill_worker_seconds"]
    assert report["gpu_hours"] == pytest.approx(wanted / 3600)
    assert "replayed in" in replay(trace, "--wall-time", "--json", file)[1]
    assert json.loads(file.read_bytes())["wall_time_ms"] > 0
    code, _, err = replay(trace, "--gpus-per-worker", "-1")
    assert (code, "--gpus-per-worker" in err) == (2, True)


def test_a_dynamo_trace_is_read_from_all_its_files(replay: Replay, tmp_path: Path) -> None:
    shards = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for at, path in enumerate(shards):
        hashes = {"trace_block_size": 64, "input_length": 100, "input_sequence_hashes": [1, at + 2]}
        said = {"request_id": f"r{at}", "request_received_ms": 100 * at, "output_tokens": 4, "replay": hashes}
        line = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 500}
        path.write_text(json.dumps(line | {"request": said}) + "\n")
    file = tmp_path / "report.json"
    code, out, _ = replay(*shards, "--format", "dynamo", "--json", file)
    assert (code, "2 requests, 2 completed; 200 input and 8 output tokens" in out) == (0, True)
    assert json.loads(file.read_bytes())["settings"]["trace"] == "one.jsonl, two.jsonl"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["/nowhere.jsonl"], ["TRACE", "/nowhere.jsonl"]),
        ([], ["--input-tokens", "TRACE"]),
        (["--input-tokens", "5", "--output-tokens", "5"], ["--requests", "TRACE"]),
        (["--input-tokens", "0", "--output-tokens", "5", "--requests", "5"], ["--input-tokens", "at least 1"]),
        (["T", "--format", "csv"], ["--format", "mooncake", "csv"]),
        (["T", "--format", "dynamo"], ["TRACE", "line 1", "schema"]),
        (["T", "T"], ["TRACE", "one file, not 2"]),
        (["T", "--trace-block-size", "0"], ["--trace-block-size", "0"]),
        (["T", "--requests", "0"], ["--requests", "at least 1"]),
        (["T", "--request-rate", "3"], ["--request-rate", "there is a trace"]),
        (["T", "--num-prefix-groups", "3"], ["--num-prefix-groups", "mooncake"]),
        (["T", "--shared-prefix-ratio", "0.5"], ["--shared-prefix-ratio", "mooncake"]),
        (["T", "--per-request"], ["--per-request", "--json"]),
        (["--skip-bad"], ["--skip-bad", "TRACE"]),
        (["--format", "dynamo"], ["--format", "TRACE"]),
        (["T", "--speed-up", "0"], ["--speed-up", "above 0"]),
        (["T", "--concurrency", "0"], ["--concurrency", "at least 1"]),
        (["T", "--sla-ttft-ms", "nan"], ["--sla-ttft-ms", "finite"]),
        (["T", "--sla-e2e-ms", "-1"], ["--sla-e2e-ms", "not negative"]),
        (["T", "--fault", "worker 7 dies at 1 s"], ["--fault", "no worker 7"]),
        (["T", "--fault", "it rains"], ["--fault", "'it'"]),
        (["T", "--fault", "@/nowhere.txt"], ["--fault", "/nowhere.txt"]),
        (["T", "--engine-arg", "volume=3"], ["--engine-arg volume"]),
        (["T", "--engine", "echo", "--prefill-workers", "1"], ["--prefill-workers", "echo"]),
        (["T", "--no-kv-events"], ["--kv-events", "router kv"]),
        (["T", "--router", "nearest"], ["--router", "round-robin"]),
        (["T", "--json", "/nowhere/report.json"], ["--json", "/nowhere/report.json"]),
        (["compare", "/nowhere.json", "T"], ["/nowhere.json"]),
        (["compare", "T", "T"], ["trace.jsonl", "no report"]),
        (["compare"], ["A.json B.json"]),
    ],
)
def test_what_is_wrong_ends_with_a_line_that_names_it(
    options: list[str], words: list[str], replay: Replay, trace: Path
) -> None:
    code, out, err = replay(*[str(trace) if option == "T" else option for option in options])
    assert (code, out) == (2, "")
    last_line = err.strip().splitlines()[-1]
    assert all(word in last_line for word in words), last_line


def test_reports_stand_side_by_side(replay: Replay, trace: Path, tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json", tmp_path / "four.json"]
    for workers, file in zip((1, 2, 4), files, strict=True):
        assert replay(trace, "--workers", str(workers), "--json", file)[0] == 0
    code, out, _ = replay("compare", *files)
    assert code == 0
    lines = {line.split("  ")[1].strip(): line.split() for line in out.splitlines() if line.startswith("  ")}
    assert lines["figure"] == ["figure", "one", "two", "four"]
    assert lines["workers"] == ["workers", "1", "2", "4"]
    assert lines["Completed"] == ["Completed", "12", "12", "=", "12", "="]
    means = [Report.from_json(file.read_bytes()).ttft.mean for file in files]
    assert lines["Time to first token (ms), mean"][6:8] == [f"{means[0]:,.2f}", f"{means[1]:,.2f}"]
    assert "seed" not in lines


def test_a_comparison_needs_two_reports() -> None:
    with pytest.raises(InvalidArgument, match="two reports"):
        comparison_text([("alone", Report())])


@pytest.mark.parametrize(("times", "said"), [(1, "needs two reports at least"), (2, "a report is given twice")])
def test_a_report_is_not_compared_with_nothing_or_with_itself(
    replay: Replay, tmp_path: Path, times: int, said: str
) -> None:
    (tmp_path / "one.json").write_bytes(Report().to_json())
    answer = replay("compare", *[tmp_path / "one.json"] * times, "--html", tmp_path / "page.html")
    assert answer == (2, "", f"Error: A.json B.json: {said}\n")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        (2.0, 3.0, "+50.0 %"),
        (4, 3, "-25.0 %"),
        (3.0, 3.0, "="),
        (0, 0, "="),
        (0, 3, ""),
        (None, 3.0, ""),
        (3, None, ""),
    ],
)
def test_a_difference_is_that_to_the_first_in_percent(first: float | None, other: float | None, text: str) -> None:
    assert difference(first, other) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_with_the_rate_and_other_files_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for file in (Terminal(), io.StringIO()):
        with progress(4, file) as heard:
            for ended in range(1, 5):
                heard(ended)
        assert ("4/4" in file.getvalue() and "requests/s" in file.getvalue()) is file.isatty()


def test_help_shows_the_options_and_where_comparing_is(replay: Replay) -> None:
    code, out, _ = replay("--help")
    assert code == 0
    assert "--speed-up" in out
    assert "penstock replay compare A.json B.json" in out


def test_a_page_with_plots_is_written_of_one_run_and_of_several(replay: Replay, trace: Path, tmp_path: Path) -> None:
    for router in ("round-robin", "kv"):
        code, _, errors = replay(
            trace,
            "--router",
            router,
            "--workers",
            2,
            "--json",
            tmp_path / f"{router}.json",
            "--html",
            tmp_path / "one.html",
        )
        assert (code, errors) == (0, "")
    assert (tmp_path / "one.html").read_text().startswith("<!DOCTYPE html>")
    both = replay("compare", tmp_path / "round-robin.json", tmp_path / "kv.json", "--html", tmp_path / "both.html")
    assert both[0] == 0
    page = (tmp_path / "both.html").read_text()
    assert all(name in page for name in ("round-robin", "kv"))
    assert replay(trace, "--html", tmp_path / "nowhere" / "page.html")[0] == 2
    runs = tmp_path / "round-robin.json", tmp_path / "kv.json"
    assert replay("compare", *runs, "--pareto", tmp_path / "pareto.html")[0] == 0
    assert "Which runs no other beats" in (tmp_path / "pareto.html").read_text()


def test_names_of_files_cannot_steer_the_terminal(replay: Replay, tmp_path: Path) -> None:
    """In errors, and in the table of a comparison, which reads no markup in them either."""
    hostile, other = tmp_path / "\x1b[31m[red]one.json", tmp_path / "two.json"
    for file in (hostile, other):
        file.write_bytes(make_report(Samples()).to_json())
    gone = hostile.with_suffix(".gone")
    for arguments, code in (((hostile, other), 0), ((gone, other), 2)):
        ended, out, err = replay("compare", *arguments)
        assert (ended, "\x1b" in out + err, "\\x1b[31m[red]one" in out + err) == (code, False, True)
    ended, out, err = replay(gone)
    assert (ended, "\x1b" in out + err, "\\x1b[31m[red]one" in err) == (2, False, True)
