"""Limits are data: from one field come an option, a variable, a check and a row of the docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import typer
from attrs import frozen
from typer.testing import CliRunner

from pipeline.protocols.limits import PromptWork, RequestLimits
from pipeline.protocols.settings import setting, settings_of
from serving.limits import HttpLimits
from serving.record_options import with_record_options

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
ROW = re.compile(r"^\| `(\w+)` \| ([\d.]+) \| (.+) \|$", re.MULTILINE)


@frozen
class Bounds:
    max_doors: int = setting(4, "Doors that may be open.", minimum=1)
    wait_s: float = setting(2.5, "How long a door stays open, in seconds.", variable="DOOR_WAIT")


def command(made: list[Any]) -> typer.Typer:
    cli = typer.Typer()

    @cli.command()
    @with_record_options
    def serve(port: int = 8000, *, bounds: Bounds) -> None:
        made.append((port, bounds))

    return cli


def run(*options: str, **variables: str) -> tuple[list[Any], Any]:
    made: list[Any] = []
    return made, CliRunner().invoke(command(made), options, env=variables)


def test_each_limit_is_a_row_of_the_docs_with_its_default_and_meaning() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("## Limits")[2].partition("\n## ")[0]
    rows = [(name, float(default), text) for name, default, text in ROW.findall(section)]
    wanted = [
        (name, float(getattr(record(), name)), known.help)
        for record in (HttpLimits, RequestLimits, PromptWork)
        for name, known in settings_of(record).items()
    ]
    assert rows == wanted


def test_a_field_without_an_option_given_has_its_default() -> None:
    assert run()[0] == [(8000, Bounds())]


def test_an_option_sets_its_field_and_leaves_the_others() -> None:
    assert run("--port", "1", "--max-doors", "7")[0] == [(1, Bounds(7, 2.5))]


def test_a_variable_sets_a_field_and_an_option_comes_first() -> None:
    assert run(PENSTOCK_MAX_DOORS="3", DOOR_WAIT="0.5")[0] == [(8000, Bounds(3, 0.5))]
    assert run("--max-doors", "9", PENSTOCK_MAX_DOORS="3")[0] == [(8000, Bounds(9, 2.5))]


@pytest.mark.parametrize("given", [{"PENSTOCK_MAX_DOORS": "0"}, {"PENSTOCK_MAX_DOORS": "many"}, {"DOOR_WAIT": "-1"}])
def test_a_variable_out_of_its_range_ends_the_program_and_is_named(given: dict[str, str]) -> None:
    made, result = run(**given)
    assert (made, result.exit_code) == ([], 2)
    assert next(iter(given)) in result.output


@frozen
class Places:
    folder: Path | None = setting(None, "Where doors are kept.")
    owners: tuple[str, ...] = setting((), "Who has a key.")
    label: str = setting("door", "What is written on them.")


def places(*options: str, **variables: str) -> Any:
    made: list[Any] = []
    cli = typer.Typer()

    @cli.command()
    @with_record_options
    def serve(*, places: Places) -> None:
        made.append(places)

    CliRunner().invoke(cli, options, env=variables)
    return made[0]


@pytest.mark.parametrize(
    ("options", "variables", "made"),
    [
        ((), {}, Places()),
        (("--folder", "a/b", "--label", "x"), {}, Places(Path("a/b"), (), "x")),
        (("--owners", "a", "--owners", "b, c,"), {}, Places(owners=("a", "b", "c"))),
        ((), {"PENSTOCK_OWNERS": "a,b", "PENSTOCK_FOLDER": "f"}, Places(Path("f"), ("a", "b"))),
        (("--owners", "c"), {"PENSTOCK_OWNERS": "a,b"}, Places(owners=("c",))),
    ],
)
def test_a_setting_may_be_a_path_a_text_or_several(
    options: tuple[str, ...], variables: dict[str, str], made: Places
) -> None:
    assert places(*options, **variables) == made


def test_a_record_refuses_a_value_below_its_minimum() -> None:
    with pytest.raises(ValueError, match="max_doors"):
        Bounds(max_doors=0)


def test_two_records_with_one_name_are_refused() -> None:
    def serve(max_doors: int = 1, *, bounds: Bounds) -> None: ...

    with pytest.raises(TypeError, match="max_doors"):
        with_record_options(serve)


def test_only_fields_made_as_settings_are_settings() -> None:
    @frozen
    class Mixed:
        name: str = "door"
        count: int = setting(1, "A count.")

    assert list(settings_of(Mixed)) == ["count"]
    assert [each.name for each in attrs.fields(Mixed)] == ["name", "count"]
