"""The program as a user starts it: what it prints, how it ends, and what it answers to wrong options."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.network.files.folder import Folder
from serving.deployment import GraphConfig
from tests.serving.worlds import post, program, until_it_drains

pytestmark = pytest.mark.slow  # each starts a program

Penstock = Callable[..., tuple[int, str, str]]

PATIENT = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "60"}
"""A server that would wait that long for an answer: what ends within `AT_ONCE_S` has not waited for it."""
AT_ONCE_S = 15

ROOT_COMMAND = [sys.executable, "-m", "serving"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ROOT_COMMAND, *options], capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal_and_ends_without_a_trace(sent: signal.Signals) -> None:
    with program("--model-name", "echo", variables=PATIENT) as (process, address):
        with post(address) as response:
            answer = json.loads(response.read())
        assert answer["choices"][0]["message"]["content"] == "hello"
        began = time.monotonic()
        process.send_signal(sent)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
        assert time.monotonic() - began < AT_ONCE_S


def test_the_first_signal_lets_answers_finish() -> None:
    with program("--engine-arg", "delay_s=0.1") as (process, address):
        with post(address, stream=True, max_tokens=5) as response:
            response.read(1)
            process.send_signal(signal.SIGINT)
            rest = response.read().decode()
        assert '"length"' in rest or '"stop"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert process.wait(timeout=10) == 0


ENDLESS = {"stream": True, "ignore_eos": True, "max_tokens": 1_000_000}


@pytest.mark.parametrize("delay", ["delay_s=0.1", "delay_s=0"], ids=["client waits", "client reads nothing"])
def test_the_second_signal_ends_at_once(delay: str) -> None:
    with (
        program("--engine-arg", delay, variables=PATIENT) as (process, address),
        post(address, **ENDLESS) as response,
    ):
        response.read(1)
        process.send_signal(signal.SIGINT)
        until_it_drains(address)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")
        assert time.monotonic() - began < AT_ONCE_S


@pytest.mark.parametrize("delay", ["delay_s=0.1", "delay_s=0"], ids=["client waits", "client reads nothing"])
def test_an_answer_that_outlives_the_grace_is_cut_off_without_a_trace(delay: str) -> None:
    at_once = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "0"}
    with (
        program("--engine-arg", delay, variables=at_once) as (process, address),
        post(address, **ENDLESS) as response,
    ):
        response.read(1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")


def test_unknown_fields_of_requests_are_ignored_if_wished() -> None:
    variables = {"DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS": "1"}
    with program(variables=variables) as (_, address), post(address, foo=1) as response:
        assert response.status == 200


@pytest.mark.parametrize("form", ["text", "mermaid", "dot"])
def test_a_graph_is_drawn_in_each_form(penstock: Penstock, form: str) -> None:
    code, drawn, errors = penstock("graph", "--form", form, "--workers", "2")
    assert (code, errors) == (0, "")
    assert all(name in drawn for name in ("Preprocess", "Detokenize", "PushRouter"))
    assert drawn.count("dyn://penstock.backend.generate/") == 2


def test_a_graph_is_drawn_as_the_environment_would_have_it_served(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", "0.9")
    monkeypatch.setenv("DYN_RUNTIME_INHIBITED_DURATION_SECS", "7")
    code, drawn, _ = penstock("graph", "--router", "p2c", "--seed", "1")
    assert code == 0
    assert drawn.startswith("Rejection(")
    assert all(word in drawn for word in ("power_of_two_choices", "cooldown_s=7", "rng=Random"))


def test_a_wrong_router_file_is_reported_with_all_that_is_wrong_in_it(penstock: Penstock, tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("router_temperature = -0.5\nrouter_queue_policy = 'lifo'\n")
    code, _, errors = penstock("serve", "--router", "kv", "--router-config", file)
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"Error: {file}: ")
    assert all(errors.count(name) == 1 for name in ("router_temperature", "router_queue_policy"))


def test_a_graph_shows_the_stage_that_routes_by_kv_blocks(penstock: Penstock, tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("use_kv_events = false\n")
    options = ("--router", "kv", "--router-config", file, "--engine", "mocker", "--form", "mermaid")
    code, drawn, errors = penstock("graph", *options)
    assert (code, errors) == (0, "")
    assert drawn.index("KvPushRouter") < drawn.index("PushRouter(dyn")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "gpt"], ["--engine", "echo", "gpt"]),
        (["--engine-arg", "delay_s=soon"], ["--engine-arg delay_s", "a number", "soon"]),
        (["--engine-arg", "volume=3"], ["--engine-arg volume", "delay_s"]),
        (["--engine-arg", "delay_s"], ["--engine-arg", "NAME=VALUE"]),
        (["--engine-arg", "delay-s=1", "--engine-arg", "delay_s=2"], ["--engine-arg", "delay_s", "twice"]),
        (["--workers", "0"], ["--workers", "0"]),
        (["--workers", "many"], ["--workers", "integer"]),
        (["--router", "nearest"], ["--router", "round-robin", "p2c", "least-loaded", "device-aware"]),
        (["--active-decode-blocks-threshold", "2"], ["--active-decode-blocks-threshold", "between 0 and 1"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--model-path", "/nowhere"], ["/nowhere"]),
        (["--unheard-of"], ["--unheard-of"]),
        (["--router", "p2c", "--no-kv-events"], ["--kv-events", "router kv"]),
        (["--router-config", "router.toml"], ["--router-config", "router kv"]),
        (["--router", "kv", "--router-config", "/nowhere.toml"], ["--router-config: /nowhere.toml", "cannot be read"]),
    ],
)
def test_a_wrong_option_ends_with_a_line_that_names_it(options: list[str], words: list[str]) -> None:
    ended = run("serve", *options)
    assert ended.returncode == 2
    last_line = ended.stderr.strip().splitlines()[-1]
    assert all(word in last_line for word in words)
    assert "Traceback" not in ended.stderr


def test_a_port_that_is_taken_is_a_line_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = run("serve", "--port", str(port))
    assert ended.returncode == 2
    assert ended.stderr == f"Error: --port: port {port} on 127.0.0.1 is in use; 0 takes a free one\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", [["serve", "--port=0"], ["status", "--runtime=file:{}/runtime", "--json"]])
def test_output_that_nobody_reads_ends_a_program_without_a_trace(command: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    Folder(tmp_path / "runtime").make()
    texts = [each.format(tmp_path) for each in command]
    ran = subprocess.run(
        [*ROOT_COMMAND, *texts], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_the_status_of_a_folder_that_is_not_there_makes_none(penstock: Penstock, tmp_path: Path) -> None:
    code, shown, errors = penstock("status", f"--runtime=file:{tmp_path / 'typo'}")
    assert (code, shown, errors) == (1, "", f"Error: there is no folder {tmp_path / 'typo'}\n")
    assert list(tmp_path.iterdir()) == []


def test_help_is_cheap() -> None:
    """What serves and computes is not loaded to answer a question."""
    code = (
        "import sys\nfrom serving.cli import main\nsys.argv = ['penstock', 'serve', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('starlette', 'uvicorn', 'tokenizers', 'jinja2', 'torch') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--model-path" in ended.stdout
    assert ended.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("library", ["cyclopts", "uvicorn"])
def test_a_program_without_its_libraries_names_what_to_install(library: str) -> None:
    """Also if the command line itself starts, since another package has brought cyclopts."""
    hide = f"import sys; sys.modules[{library!r}] = None; sys.argv = ['penstock', 'serve']; "
    start = "from serving.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", hide + start], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"penstock: {library} is missing; install the program with: pip install 'penstock[serve]'\n"


@pytest.mark.parametrize("arguments", [(), ("--runtime", "file:deployment")])
def test_a_front_end_of_a_runtime_has_no_workers_of_its_own(
    arguments: tuple[str, ...], penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what its config demands of them is not checked before those of other processes are known."""
    configs: list[GraphConfig] = []
    monkeypatch.setattr("serving.program.run_server", lambda *given: configs.append(given[2]))
    assert penstock("serve", *arguments)[0] == 0
    assert [config.is_announced for config in configs] == [bool(arguments)]
