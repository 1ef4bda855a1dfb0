"""The command line of Penstock: `main` is the program, `commands` are its commands with all their settings."""

from pipeline.extras import brought_by

with brought_by("serve", by=__name__):
    from .app import main
    from .parsing import commands

__all__ = ["commands", "main"]
