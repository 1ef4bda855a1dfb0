"""Options, variables, the settings file and defaults: which comes first, and the errors for wrong ones."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.cli import commands

Penstock = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    """Write a settings file."""

    def write(text: str) -> Path:
        path = tmp_path / "penstock.toml"
        path.write_text(text)
        return path

    return write


def origins(out: str) -> dict[str, tuple[str, str]]:
    """The value and the origin of each setting that `penstock config` printed."""
    lines = [line.split("  # ") for line in out.splitlines() if " = " in line]
    return {line.partition(" = ")[0]: (line.partition(" = ")[2].strip(), origin) for line, origin in lines}


def test_an_option_comes_before_a_variable_before_the_file_before_the_default(
    penstock: Penstock, file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file("workers = 2\nprefill_workers = 2\nmigration_limit = 2\n")
    monkeypatch.setenv("PENSTOCK_PREFILL_WORKERS", "4")
    monkeypatch.setenv("DYN_MIGRATION_LIMIT", "4")
    code, out, err = penstock("config", "--config", path, "--migration-limit", "5")
    shown = origins(out)
    assert (code, err) == (0, "")
    assert shown["port"] == ("8000", "default")
    assert shown["workers"] == ("2", f"file: {path}: workers")
    assert shown["prefill_workers"] == ("4", "environment: PENSTOCK_PREFILL_WORKERS")
    assert shown["migration_limit"] == ("5", "option: --migration-limit")


def test_a_variable_names_the_file_too(
    penstock: Penstock, file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CONFIG", str(file("workers = 7\n")))
    assert origins(penstock("config")[1])["workers"][0] == "7"


@pytest.mark.parametrize("name", ["serve", "graph", "replay", "sweep"])
def test_what_is_printed_is_a_file_that_gives_the_same_settings(
    name: str, penstock: Penstock, file: Callable[[str], Path]
) -> None:
    given = ("--engine-arg", "speedup_ratio=9", "--migration-limit", "1", "--no-kv-events")
    _, first, _ = penstock("config", name, "--engine", "mocker", *given)
    assert tomllib.loads(first)["engine_arg"] == ["speedup_ratio=9"]
    code, again, err = penstock("config", name, "--config", file(first))
    assert (code, err) == (0, "")
    assert {key: value for key, (value, _) in origins(again).items()} == {
        key: value for key, (value, _) in origins(first).items()
    }


def test_one_file_serves_all_commands(penstock: Penstock, file: Callable[[str], Path]) -> None:
    path = file('port = 1\nformat = "dynamo"\nengine = "mocker"\n')
    assert "format" not in origins(penstock("config", "--config", path)[1])
    assert "port" not in origins(penstock("config", "replay", "--config", path)[1])


def test_the_file_has_arguments_of_the_engine_and_settings_of_the_router_as_tables(
    penstock: Penstock, file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'engine = "mocker"\nrouter = "kv"\n[engine_arg]\nblock_size = 2\n[router_config]\nrouter_temperature = -1\n'
    path = file(text)
    code, _, err = penstock("graph", "--config", path)
    assert (code, err.count("\n"), "router_temperature" in err) == (2, 1, True)
    monkeypatch.setenv("DYN_ROUTER_TEMPERATURE", "0.5")  # comes before the file
    code, out, err = penstock("graph", "--config", path)
    assert (code, err, "KvPushRouter" in out) == (0, "", True)
    code, _, err = penstock("graph", "--config", path, "--engine-arg", "block_size=1")
    assert (code, "--engine-arg block_size: must be at least 2" in err) == (2, True)


def test_the_file_sets_variables_that_have_no_option(penstock: Penstock, file: Callable[[str], Path]) -> None:
    path = file("[environment]\nDYN_RUNTIME_INHIBITED_DURATION_SECS = 7\n")
    assert "cooldown_s=7" in penstock("graph", "--config", path)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wrkers = 3", ["wrkers is not a setting; did you mean workers?"]),
        ("workers = 0", ["workers: must be at least 1, got 0"]),
        ('workers = "3"', ["workers: must be an integer, got '3'"]),
        ("enforce_disagg = 1", ["enforce_disagg: must be true or false, got 1"]),
        ('router = "fastest"', ["router: must be one of round-robin, random", "got 'fastest'"]),
        ("model_path = 3", ["model_path: must be a path or none, got 3"]),
        ("environment = 3", ["environment: must be a table"]),
        ("workers = ", ["is no TOML"]),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_its_path(
    text: str, words: list[str], penstock: Penstock, file: Callable[[str], Path]
) -> None:
    path = file(text)
    code, out, err = penstock("graph", "--config", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(word in err for word in (str(path), *words)), err


def test_problems_of_all_sources_are_reported_at_once(
    penstock: Penstock, file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file("wrkers = 3\nprefill_workers = -1\n")
    monkeypatch.setenv("DYN_MIGRATION_LIMIT", "often")
    code, _, err = penstock("serve", "--config", path, "--port", "x")
    assert (code, sorted(line.split(": ")[1] for line in err.splitlines())) == (
        2,
        sorted([str(path), str(path), "DYN_MIGRATION_LIMIT", "--port"]),
    )


def test_a_file_that_is_not_there_is_an_error(penstock: Penstock) -> None:
    code, _, err = penstock("graph", "--config", "/nowhere.toml")
    assert (code, err) == (2, "Error: --config: /nowhere.toml: cannot be read: No such file or directory\n")


def test_an_argument_of_a_foreign_engine_that_may_be_a_secret_is_not_printed(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_engine.py").write_text("def make(api_key: str, size: int = 1): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ("--engine-arg", "api_key=s3cret", "--engine-arg", "size=3")
    _, out, _ = penstock("config", "--engine", "foreign_engine:make", *arguments)
    assert ("s3cret" in out, "size=3" in out, "(not shown)" in out) == (False, True, True)


def test_every_command_that_runs_something_takes_a_settings_file() -> None:
    for name in ("serve", "worker", "graph", "replay", "replay sweep"):
        assert "config" in commands[name].settings()


def test_a_variable_that_cannot_be_read_ends_the_program_before_it_starts(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_HTTP_BODY_LIMIT_MB", "45MB")
    monkeypatch.setenv("DYN_CANARY_WAIT_TIME", "soon")
    code, out, err = penstock("graph")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "Error: DYN_CANARY_WAIT_TIME: must be a number of at least 0, got 'soon'",
        "Error: DYN_HTTP_BODY_LIMIT_MB: must be a whole number from 1 to 1048576, got '45MB'",
    ]


def test_a_variable_that_nothing_reads_is_a_warning(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_WORKRES", "4")
    assert penstock("graph")[0] == 0
    assert "PENSTOCK_WORKRES is set and nothing reads it; did you mean PENSTOCK_WORKERS?" in caplog.messages


def test_variables_without_an_option_are_printed_where_they_are_set(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_HTTP_BODY_LIMIT_MB", "64")
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", '{"token": "s3cret"}')
    out = penstock("config")[1]
    assert origins(out)["DYN_HTTP_BODY_LIMIT_MB"] == ('"64"', "environment")
    assert ("s3cret" in out, "DYN_HEALTH_CHECK_PAYLOAD" in out) == (False, True)


def test_a_program_beside_pydantic_takes_the_same_options(penstock: Penstock) -> None:
    """The library of the command line hands values to pydantic where another package has loaded it."""
    import pydantic  # noqa: F401

    code, out, err = penstock("config", "--no-kv-events", "--model-name", "m")
    assert (code, err) == (0, "")
    assert (origins(out)["kv_events"][0], origins(out)["model_name"][0]) == ("false", '"m"')
