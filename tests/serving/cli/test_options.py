"""Settings are data: from one field come an option, a variable, a key of a file, a check and a row of the docs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import pytest
from attrs import frozen
from cyclopts import App

from pipeline import InvalidArgument
from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.settings import at_least, setting, settings_of
from serving.cli.commands import command, run_program
from serving.limits import HttpLimits
from serving.settings import Settled

DOCS = Path(__file__).parents[3] / "docs" / "server.md"
ROW = re.compile(r"^\| `(\w+)` \| ([\d.]+) \| (.+) \|$", re.MULTILINE)


@frozen
class Bounds:
    group: ClassVar[str] = "Limits"

    max_doors: int = setting(4, "Doors that may be open.", at_least(1))
    wait_s: float = setting(2.5, "How long a door stays open, in seconds.", variable="DOOR_WAIT")


@frozen
class Places:
    folder: Path | None = setting(None, "Where doors are kept.")
    owners: tuple[str, ...] = setting((), "Who has a key.", separator=",")
    label: str = setting("door", "What is written on them.")
    colour: Literal["red", "blue"] = setting("red", "What they are painted in.")
    is_locked: bool = setting(False, "Whether a key is needed.")
    words: tuple[str, ...] = setting((), "Texts with commas.", variable="")


class Program:
    """A program with one command that takes these records; `made` are those of its last run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.made: tuple[Bounds, Places] | None = None
        self.given: set[str] = set()
        self.app = App(name="doors")

        @command(self.app)
        def serve(bounds: Bounds, places: Places, settled: Settled) -> None:
            self.made, self.given = (bounds, places), settled.options

    def run(self, *options: str, **variables: str) -> str:
        """Run the command with the variables set; return what it wrote to standard error."""
        with self._monkeypatch.context() as environment:
            for name, text in variables.items():
                environment.setenv(name, text)
            self.made = None
            try:
                self.code: Any = run_program(self.app, ["serve", *options])
            except SystemExit as end:
                self.code = end.code
        return self._capsys.readouterr().err


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(monkeypatch, capsys)


def test_each_limit_is_a_row_of_the_docs_with_its_default_and_meaning() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Limits")[2].partition("\n## ")[0]
    rows = [(name, float(default), text) for name, default, text in ROW.findall(section)]
    wanted = [
        (name, float(getattr(record(), name)), known.help)
        for record in (HttpLimits, RequestLimits, PromptWork)
        for name, known in settings_of(record).items()
    ]
    assert rows == wanted


def test_a_setting_that_is_not_given_has_its_default(program: Program) -> None:
    assert program.run() == ""
    assert program.made == (Bounds(), Places())


@pytest.mark.parametrize(
    ("options", "variables", "made"),
    [
        (("--max-doors", "7"), {}, Bounds(7, 2.5)),
        ((), {"PENSTOCK_MAX_DOORS": "3", "DOOR_WAIT": "0.5"}, Bounds(3, 0.5)),
        ((), {"PENSTOCK_MAX_DOORS": " "}, Bounds()),
        (("--max-doors", "9"), {"PENSTOCK_MAX_DOORS": "3"}, Bounds(9, 2.5)),
    ],
)
def test_an_option_comes_before_a_variable(
    program: Program, options: tuple[str, ...], variables: dict[str, str], made: Bounds
) -> None:
    program.run(*options, **variables)
    assert program.made == (made, Places())


@pytest.mark.parametrize(
    ("options", "variables", "made"),
    [
        (("--folder", "a/b", "--label", "x"), {}, Places(Path("a/b"), (), "x")),
        (("--owners", "a", "--owners", "b, c,"), {}, Places(owners=("a", "b", "c"))),
        ((), {"PENSTOCK_OWNERS": "a,b", "PENSTOCK_FOLDER": "f"}, Places(Path("f"), ("a", "b"))),
        (("--owners", "c"), {"PENSTOCK_OWNERS": "a,b"}, Places(owners=("c",))),
        (("--words", "a,b", "--words", "c"), {}, Places(words=("a,b", "c"))),
        (("--colour", "blue", "--is-locked"), {}, Places(colour="blue", is_locked=True)),
        (("--no-is-locked",), {"PENSTOCK_IS_LOCKED": "yes"}, Places()),
        ((), {"PENSTOCK_IS_LOCKED": "On", "PENSTOCK_COLOUR": "blue"}, Places(colour="blue", is_locked=True)),
    ],
)
def test_a_setting_may_be_a_path_a_text_a_choice_a_switch_or_several(
    program: Program, options: tuple[str, ...], variables: dict[str, str], made: Places
) -> None:
    program.run(*options, **variables)
    assert program.made == (Bounds(), made)


@pytest.mark.parametrize(
    ("options", "variables", "line"),
    [
        ((), {"PENSTOCK_MAX_DOORS": "0"}, "PENSTOCK_MAX_DOORS: must be at least 1, got 0"),
        ((), {"PENSTOCK_MAX_DOORS": "many"}, "PENSTOCK_MAX_DOORS: must be an integer, got 'many'"),
        ((), {"DOOR_WAIT": "-1"}, "DOOR_WAIT: must be at least 0, got -1"),
        (("--max-doors", "0"), {}, "--max-doors: must be at least 1, got 0"),
        (("--wait-s", "nan"), {}, "--wait-s: must be at least 0, got nan"),
        (("--colour", "green"), {}, "--colour: must be one of red, blue, got 'green'"),
        ((), {"PENSTOCK_IS_LOCKED": "maybe"}, "PENSTOCK_IS_LOCKED: must be true or false, got 'maybe'"),
    ],
)
def test_a_value_that_cannot_be_ends_the_program_with_its_place_and_what_is_allowed(
    program: Program, options: tuple[str, ...], variables: dict[str, str], line: str
) -> None:
    assert program.run(*options, **variables) == f"Error: {line}\n"
    assert (program.made, program.code) == (None, 2)


def test_all_that_is_wrong_is_reported_at_once(program: Program) -> None:
    errors = program.run("--max-doors", "x", "--colour", "green", DOOR_WAIT="-1").splitlines()
    assert [line.split(": ")[1] for line in errors] == ["--max-doors", "DOOR_WAIT", "--colour"]


def test_a_command_learns_which_settings_were_options(program: Program) -> None:
    program.run("--max-doors", "4", PENSTOCK_LABEL="x")
    assert program.given == {"max_doors"}


def test_an_object_with_fields_out_of_range_cannot_be_made_and_names_them_all() -> None:
    with pytest.raises(InvalidArgument, match=r"max_doors: .*; wait_s: ") as raised:
        Bounds(max_doors=0, wait_s=-1)
    assert raised.value.field == "max_doors"


def test_two_records_with_one_name_are_refused() -> None:
    @frozen
    class Gates:
        max_doors: int = setting(1, "Doors of a gate.")

    def serve(gates: Gates, bounds: Bounds) -> None: ...

    serve.__annotations__ = {"gates": Gates, "bounds": Bounds, "return": None}
    with pytest.raises(TypeError, match="max-doors"):
        command(App(name="doors"))(serve)


def test_only_fields_made_as_settings_are_settings() -> None:
    @frozen
    class Mixed:
        name: str = "door"
        count: int = setting(1, "A count.")

    assert list(settings_of(Mixed)) == ["count"]
    assert [each.name for each in attrs.fields(Mixed)] == ["name", "count"]


@pytest.mark.parametrize("command", ["serve", "worker", "up", "status", "replay", "graph"])
def test_the_help_names_no_default_where_there_is_none(command: str, penstock: Callable[..., Any]) -> None:
    code, out, _ = penstock(command, "--help")
    assert code == 0
    assert "[default: ]" not in out
