"""`python -m serving` is the program too."""

from __future__ import annotations

from .cli import main

main()
