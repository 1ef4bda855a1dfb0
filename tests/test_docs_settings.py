"""docs/settings.md lists every setting, as the records of settings have it.

python tests/test_docs_settings.py > docs/settings.md          after a setting has changed
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from operators.kv import KvRouterConfig  # noqa: E402
from pipeline.settings import Setting, settings_of  # noqa: E402
from serving.cli import GROUPS, commands  # noqa: E402
from serving.settings import as_text  # noqa: E402
from serving.variables import RECORDS, VARIABLES  # noqa: E402

INTRODUCTION = """# Settings

Every setting of the programs, made from the records that declare them. [Server](server.md#settings) has where a value
may be given, and which place comes first. The key in a settings file is the name of the option with underscores and
without the leading hyphens: `--max-tools` is `max_tools`.
"""
COMMANDS = ("serve", "worker", "up", "status", "graph", "replay", "replay sweep", "replay compare", "key new")
ROUTER = """
## Router kv

In the file of `--router-config`, or in the table `[router_config]` of a settings file.

| setting | variable | default | meaning |
|---|---|---|---|"""
VARIABLES_ONLY = """
## Variables without an option

In a settings file they stand in the table `[environment]`.

| variable | default | meaning |
|---|---|---|"""


def default_of(known: Setting) -> str:
    return (
        "" if known.default in (None, ()) or not isinstance(known.default, str | int | float) else cell(known.default)
    )


def default_of_variable(value: object) -> str:
    """A switch is off by default; some have a field that is then on."""
    return "off" if isinstance(value, bool) else "" if value is None else cell(value)


def cell(value: object) -> str:
    return f"`{as_text(value)}`" if value != "" else ""


def text_of(help: str) -> str:
    return help.replace("|", "\\|")


def page() -> Iterator[str]:
    """The lines of the page."""
    yield INTRODUCTION.rstrip()
    known = {name: commands[name].settings() for name in COMMANDS}
    for group in GROUPS:
        rows: dict[tuple[str, str, str, str], list[str]] = {}
        for command, settings in known.items():
            for one in settings.values():
                if one.group == group:
                    names = ", ".join(f"`{option}`" for option in one.options) or f"`{one.metavar}`"
                    variable = f"`{one.variable}`" if one.variable else ""
                    row = (names, variable, default_of(one), text_of(one.help))
                    rows.setdefault(row, []).append(command)
        if not rows:
            continue
        yield f"\n## {group}\n\n| option | variable | default | of | meaning |\n|---|---|---|---|---|"
        for (names, variable, default, meaning), used in rows.items():
            yield f"| {names} | {variable} | {default} | {', '.join(used)} | {meaning} |"
    yield ROUTER
    for one in settings_of(KvRouterConfig).values():
        variable = f"`{one.variable}`" if one.variable else ""
        yield f"| `{one.name}` | {variable} | {default_of(one)} | {text_of(one.help)} |"
    yield VARIABLES_ONLY
    lines = {v.name: f"| `{v.name}` | {default_of_variable(v.default)} | {v.help} |" for v in VARIABLES}
    for record in RECORDS:
        for one in settings_of(record).values():
            line = f"| `{one.variable}` | {default_of_variable(one.default)} | {one.help} |"
            lines.setdefault(one.variable, line)
    yield from sorted(lines.values())


def test_the_page_lists_every_setting_as_it_is_declared() -> None:
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").splitlines() == "\n".join(page()).splitlines()


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
