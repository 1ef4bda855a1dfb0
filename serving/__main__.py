"""The program: `penstock`, and `python -m serving`."""

from __future__ import annotations

import sys

_EXTRA = {
    *("httptools", "httpx2", "opentelemetry", "prometheus_client", "rich", "starlette", "tokenizers", "typer"),
    *("uvicorn", "uvloop", "yaml"),
}
"""The libraries of the extra `serve`."""


def main() -> None:
    """Run the command line; end with one line if a library that it needs is not installed.

    That may come late: other packages bring typer, which is all that the command line itself needs.
    """
    try:
        from .cli import main as run

        run()
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in _EXTRA:
            raise
        sys.exit(f"penstock: {missing.name} is missing; install the program with: pip install 'penstock[serve]'")


if __name__ == "__main__":
    main()
