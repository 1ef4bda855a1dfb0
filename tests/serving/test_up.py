"""up: which programs a deployment has and what they get; metrics of all processes as one page. Virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme
from attrs import evolve

from pipeline import InvalidArgument
from pipeline.network.tcp import TcpRequestPlane
from serving import up
from serving.child_commands import command_of
from serving.cli import commands
from serving.cli.started_programs import check_of_workers, plan_of, routed, worker_values
from serving.deployment import kv_router_config
from serving.http import group_app
from serving.listeners import listen
from serving.processes import Program, ProgramState
from serving.runtimes import runtime_of
from serving.settings import RUNTIME_TOKEN, RuntimeOptions, ServedGraph, ServerOptions, Settled
from serving.socket import PORT_SHARES
from serving.up import FRONTENDS, WORKERS, Sockets, programs_of, run_up
from tests.serving.worlds import Exchange

URL = "file:/shared"


def settled(command: str = "up", environment: Mapping[str, str] | None = None, **options: Any) -> Settled:
    """The settings of a command that was given these options."""
    return commands[command].settle(options, environment or {})


def given(of: Settled, name: str = "worker", **own: Any) -> list[str]:
    """The arguments of a program that this one starts."""
    return command_of(name, commands[name].settings(), of, own)[4:]


def url() -> str:
    """The URL of the runtime."""
    return URL


def line_of(program: Program) -> list[str]:
    """The arguments that a program is started with."""
    return [*program.command, *program.arguments()][4:]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    with ExitStack() as opened:
        yield Sockets(opened, opened.enter_context(listen("127.0.0.1", 0)), Path("/shares"))


def test_only_options_are_passed_on_since_variables_are_inherited() -> None:
    found = settled(environment={"DYN_NAMESPACE": "a", "PENSTOCK_MODEL_NAME": "b"}, component="c")
    assert given(found, engine="mocker") == ["mocker", "--component=c"]


def test_each_form_of_option_is_passed_on_as_it_was_given() -> None:
    options: dict[str, Any] = {
        "engine_arg": ["a=1", "b=--2"],
        "access_log": True,
        "max_connections": "7",
        "model_name": "-m",
    }
    assert given(settled(**options), engine="mocker") == [
        *("mocker", "--engine-arg=a=1", "--engine-arg=b=--2", "--model-name=-m"),
        *("--access-log", "--max-connections=7"),
    ]
    assert given(settled(exclude_tools_when_tool_choice_none=False), engine="e") == [
        "e",
        "--no-exclude-tools-when-tool-choice-none",
    ]


def test_own_values_come_before_what_was_given() -> None:
    assert given(settled(runtime="nats://h:1"), engine="e", runtime=URL) == ["e", f"--runtime={URL}"]


def test_the_settings_file_is_read_again_by_each_program(tmp_path: Path) -> None:
    (path := tmp_path / "p.toml").write_text('model_name = "m"\nworkers = 3\n')
    found = settled(config=str(path))
    command = command_of("worker", commands["worker"].settings(), found, {"engine": "e"})
    assert command[1:] == ["-m", "serving", "worker", f"--config={path}", "e"]


def test_the_command_of_a_program_gives_back_its_settings() -> None:
    found = settled(router="kv", seed="3")
    command = command_of("serve", commands["serve"].settings(), found, {"runtime": URL, "processes": 1})
    options = dict(each.removeprefix("--").split("=") for each in command[4:])
    again = commands["serve"].settle(options, {})
    values = {name: each.value for those in again.values.values() for name, each in those.items()}
    assert (values["router"], values["seed"], values["runtime"]) == ("kv", 3, URL)


def test_a_deployment_has_its_workers_prefill_workers_and_front_ends(sockets: Sockets) -> None:
    found = settled(engine="mocker", workers="2", prefill_workers="1", frontends="2", host="::1", router="kv")
    plan = plan_of(found, 2, None, **worker_values(found.made(ServedGraph), found))
    programs = programs_of(plan, url, {"A": "b"}, sockets)
    assert [(each.name, each.stage) for each in programs] == [
        ("prefill-1", WORKERS),
        ("worker-1", WORKERS),
        ("worker-2", WORKERS),
        ("frontend-1", FRONTENDS),
        ("frontend-2", FRONTENDS),
    ]
    prefill, worker, _, front, other = map(line_of, programs)
    assert prefill == ["mocker", "--disaggregation-mode=prefill", f"--runtime={URL}"]
    assert worker == ["mocker", "--disaggregation-mode=decode", "--may-prefill", f"--runtime={URL}"]
    assert front == other == ["--router=kv", "--processes=1", f"--runtime={URL}"]
    assert [each.environment.get(PORT_SHARES) for each in programs] == [None, None, None, "0:/shares", "1:/shares"]
    assert all(each.environment["A"] == "b" for each in programs)
    assert programs[3].sockets["http"] is programs[4].sockets["http"] is sockets.http
    assert programs[3].sockets["admin"] is not programs[4].sockets["admin"]
    assert list(programs[0].sockets) == ["status"]


def test_each_server_behind_the_graph_has_a_worker(sockets: Sockets) -> None:
    found = settled(upstream=["http://a,http://b"], prefill_upstream=["http://c"], kv_connector="mooncake")
    plan = plan_of(found, 1, None, **worker_values(found.made(ServedGraph), found))
    prefill, one, other, front = map(line_of, programs_of(plan, url, {}, sockets))
    mode = ["--disaggregation-mode=decode", "--may-prefill", f"--runtime={URL}"]
    assert one == ["--upstream=http://a", "--kv-connector=mooncake", *mode]
    assert other == ["--upstream=http://b", "--kv-connector=mooncake", *mode]
    assert prefill[:3:2] == ["--upstream=http://c", "--disaggregation-mode=prefill"]
    assert front == ["--processes=1", f"--runtime={URL}"]


def test_workers_that_must_not_prefill_do_not(sockets: Sockets) -> None:
    found = settled(prefill_workers="1", enforce_disagg=True)
    plan = plan_of(found, 1, None, **worker_values(found.made(ServedGraph), found))
    worker = programs_of(plan, url, {}, sockets)[1]
    assert "--no-may-prefill" in worker.command


def test_more_processes_of_serve_do_not_start_more_processes_themselves(sockets: Sockets) -> None:
    found = settled("serve", {"PENSTOCK_PROCESSES": "2"}, runtime=URL)
    (front, _) = programs_of(plan_of(found, 2, URL), url, {}, sockets)
    assert front.command[-1] == "--processes=1"
    assert front.command[1:4] == ["-m", "serving", "serve"]


def test_a_program_has_more_time_to_end_than_it_needs_itself(sockets: Sockets) -> None:
    environment = {
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "100",
        "DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT": "200",
        "PENSTOCK_HTTP_HAND_OVER_SECS": "7",
    }
    found = settled()
    plan = plan_of(found, 1, None, **worker_values(found.made(ServedGraph), found))
    worker, front = programs_of(plan, url, environment, sockets)
    assert worker.end_s > 205
    assert front.end_s > 307
    one_second_more = environment | {"PENSTOCK_HTTP_HAND_OVER_SECS": "8"}
    assert programs_of(plan, url, one_second_more, sockets)[1].end_s == front.end_s + 1


@pytest.mark.parametrize("option", ["port", "admin_port"])
def test_a_port_that_is_taken_is_that_of_its_option(option: str) -> None:
    with listen("127.0.0.1", 0) as taken:
        options: dict[str, Any] = {"port": "0", option: str(taken.getsockname()[1])}
        found = settled(**options)
        with pytest.raises(InvalidArgument, match="is in use") as refused:
            run_up(plan_of(found, 1, URL), found.made(ServerOptions), {})
    assert refused.value.field == option


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"runtime_host": "h"}, "runtime_host", "goes with --runtime"),
        ({"runtime": "memory", "runtime_tls_ca": "/ca"}, "runtime_tls_ca", "goes with --runtime"),
        ({"runtime": URL, "runtime_tls_cert": "/c"}, "runtime_tls_key", "are given together"),
        ({"runtime": URL, "runtime_tls_key": "/k"}, "runtime_tls_cert", "are given together"),
        ({"runtime": URL, "runtime_tls_ca": "/ca"}, "runtime_tls_ca", "goes with --runtime-tls-cert"),
        ({"runtime": "redis://h"}, "runtime", "a runtime is at"),
        ({"runtime": URL, "runtime_tls_cert": "/none", "runtime_tls_key": "/k"}, "runtime_tls_cert", "cannot be read"),
        ({"runtime": URL, "runtime_tls_cert": "CERT", "runtime_tls_key": "/none"}, "runtime_tls_key", "cannot be read"),
    ],
)
def test_options_of_the_runtime_that_do_not_go_together_are_named(
    options: dict[str, str], field: str, text: str, tmp_path: Path
) -> None:
    trustme.CA().issue_cert("worker.test").cert_chain_pems[0].write_to_path(cert := tmp_path / "cert.pem")
    given: dict[str, Any] = {name: value.replace("CERT", str(cert)) for name, value in options.items()}
    with pytest.raises(InvalidArgument, match=text) as refused:
        runtime_of(settled("status", **given).made(RuntimeOptions), {})
    assert refused.value.field == field


def test_a_runtime_in_memory_is_that_of_a_process_alone() -> None:
    for found in (settled("status"), settled("status", runtime="memory")):
        assert found.made(RuntimeOptions).url is None


def test_the_token_of_a_runtime_has_no_blanks_around_it(tmp_path: Path) -> None:
    options = settled("status", runtime=f"file:{tmp_path}").made(RuntimeOptions)
    requests = runtime_of(options, {RUNTIME_TOKEN: " secret\n"}).requests
    assert isinstance(requests, TcpRequestPlane)
    assert requests.options.token == "secret"


@pytest.mark.parametrize(
    "option", [{"engine": "echo"}, {"workers": "2"}, {"model_path": "."}, {"upstream": ["http://a"]}]
)
def test_what_belongs_to_workers_is_refused_by_the_front_end_of_a_runtime(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="the workers of a runtime have their own") as refused:
        check_of_workers(settled("serve", runtime=URL, **option))
    assert refused.value.field == next(iter(option))


def test_variables_for_workers_are_not_refused() -> None:
    check_of_workers(settled("serve", {"PENSTOCK_ENGINE": "mocker", "PENSTOCK_WORKERS": "3"}, runtime=URL))


def test_a_front_end_of_a_runtime_passes_over_what_variables_have_for_workers() -> None:
    variables = {"PENSTOCK_ENGINE": "none", "PENSTOCK_MODEL_NAME": "m", "PENSTOCK_PREFILL_WORKERS": "2"}
    graph: ServedGraph = settled("serve", variables, runtime=URL, router="kv").made(ServedGraph)
    config = routed(graph).config({}, has_replicas=True, is_announced=True)
    assert (config.model_name, config.prefill_workers, config.router) == (None, 0, "kv")
    assert config.kv_router.router_replica_sync


@pytest.mark.parametrize(("variables", "shares"), [({}, True), ({"DYN_ROUTER_REPLICA_SYNC": "false"}, False)])
def test_front_ends_share_bookings_unless_that_is_switched_off(variables: dict[str, str], shares: bool) -> None:
    assert kv_router_config(None, variables, has_replicas=True).router_replica_sync is shares
    assert kv_router_config({"router_replica_sync": False}, {}, has_replicas=True).router_replica_sync is False
    assert not kv_router_config(None, {}).router_replica_sync


async def test_a_nats_server_finds_its_port_and_keeps_it_when_it_is_started_again(
    sockets: Sockets, tmp_path: Path
) -> None:
    plan = evolve(plan_of(settled(engine="mocker"), 1, None), broker="nats")
    (broker,), runtime = up._runtime(plan, tmp_path, {})
    (configured,) = (Path(each) for each in broker.arguments() if each.endswith(".json"))
    assert json.loads(configured.read_text())["port"] == -1
    assert broker.probe is not None
    with anyio.move_on_after(1):
        pytest.fail(await broker.probe())  # the server has not written its ports yet
    (tmp_path / "nats" / "nats-server_7.ports").write_text('{"nats": ["nats://127.0.0.1:4711"]}')
    assert await broker.probe() == "nats-server at nats://127.0.0.1:4711"
    front = programs_of(plan, runtime, {}, sockets)[-1]
    assert front.arguments() == ["--runtime=nats://127.0.0.1:4711"]
    broker.arguments()
    assert json.loads(configured.read_text())["port"] == 4711
    assert list((tmp_path / "nats").glob("*.ports")) == []


@pytest.mark.parametrize(("is_ready", "status"), [(True, 200), (False, 503)])
async def test_the_health_of_a_deployment_has_every_process(is_ready: bool, status: int) -> None:
    states = [ProgramState("worker-1", True, 1, ""), ProgramState("frontend-1", is_ready, 2, "was ended by signal 9")]

    async def metrics() -> str:
        return "a 1\n"

    app = group_app(metrics, lambda: states)
    health = Exchange(app, "/health", method="GET")
    await health.run()
    assert health.status == status
    assert [each["name"] for each in json.loads(health.content)["processes"]] == ["worker-1", "frontend-1"]
    page = Exchange(app, "/metrics", method="GET")
    await page.run()
    assert page.content == b"a 1\n"
    other = Exchange(app, "/other", method="GET")
    await other.run()
    assert other.status == 404
