"""docs/security.md names what there is: its options exist, with the defaults it gives, and its tables are whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import attrs
import pytest

from pipeline.settings import Setting, settings_of
from serving.access import ALL_PRIVILEGES, ApiKey
from serving.cli import commands
from serving.settings import AccessOptions

PAGE = (Path(__file__).parents[1] / "docs" / "security.md").read_text(encoding="utf-8")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OF_OTHERS = {"--name"}
"""Options of `penstock key`."""


def options_of(command: str) -> dict[str, Setting]:
    """The settings of a command by option."""
    return {option: known for known in commands[command].settings().values() for option in known.options}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def unknown(text: str, known: Iterable[str]) -> set[str]:
    return set(OPTION.findall(text)) - set(known)


def test_every_option_of_the_page_is_one() -> None:
    assert unknown(PAGE, options_of("serve").keys() | OF_OTHERS) == set()
    assert unknown("`--api-keyz`", options_of("serve")) == {"--api-keyz"}


@pytest.mark.parametrize("title", ["Checklist for a public address", "Defaults"])
def test_what_the_page_advises_is_an_option_of_a_worker_too(title: str) -> None:
    assert len(OPTION.findall(section(title))) > 5
    assert unknown(section(title), options_of("worker")) == set()


def test_the_defaults_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| `(--[\w-]+)` \| ([^|]+?) \| ?(?:`(\w+)`)?", section("Defaults"), re.MULTILINE)
    known = options_of("serve")
    for option, default, variable in rows:
        value = known[option].default
        assert default.partition(":")[0] == ("none" if value in (None, [], ()) else str(value)), option
        assert variable == (known[option].variable), option
    wanted = {"--" + name.replace("_", "-") for name in settings_of(AccessOptions)}
    assert {option for option, _, _ in rows} == wanted | {"--host", "--tls-handshake-timeout-s"}


def test_the_fields_of_a_key_and_the_privileges_are_all_there() -> None:
    keys = re.findall(r"^\| `(\w+)` \|", section("API keys"), re.MULTILINE)
    fields = [field.name for field in attrs.fields(ApiKey)]
    assert keys[: len(fields)] == fields
    assert set(keys[len(fields) :]) == ALL_PRIVILEGES
