"""The pages of `--help`: plain text in two columns, which a terminal, a pager and grep can read alike."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from cyclopts.help import PlainFormatter

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

_WIDEST = 120
"""Characters of a line, at most."""
_COLUMN = 34
"""Where descriptions begin."""


class PlainHelp(PlainFormatter):
    """Prints the parts of a page; cyclopts calls it for each."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print one part of a page: each option, and beside or below it what it means."""
        if not panel.entries:
            return
        width = min(console.width, _WIDEST)
        lines = [f"{panel.title}:"]
        for entry in panel.entries:
            name = f"  {', '.join(entry.display_labels_with_metavar)}"
            text = str(getattr(entry.description, "primary_renderable", entry.description or ""))
            described = wrap(text, max(width - _COLUMN, 20), break_on_hyphens=False) or [""]
            if len(name) + 2 > _COLUMN:
                lines.append(name)
                name = ""
            lines += [f"{name:{_COLUMN}}{described[0]}", *(f"{'':{_COLUMN}}{line}" for line in described[1:])]
        text = "\n".join(line.rstrip() for line in lines)
        console.print(f"{text}\n", highlight=False, markup=False, soft_wrap=True)
