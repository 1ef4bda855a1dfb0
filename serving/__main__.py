"""The program: `penstock`, and `python -m serving`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; says so in one line if what it needs was not installed."""
    try:
        from .cli import main as run
    except ModuleNotFoundError as missing:
        sys.exit(f"penstock: {missing.name} is missing; install the program with: pip install 'penstock[serve]'")
    run()


if __name__ == "__main__":
    main()
