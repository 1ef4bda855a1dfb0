"""The command line of Penstock: `main` is the program, `commands` its commands by name with their settings."""

from pipeline.extras import brought_by

with brought_by("serve", by=__name__):
    from .app import main
    from .commands import GROUPS, commands

__all__ = ["GROUPS", "commands", "main"]
