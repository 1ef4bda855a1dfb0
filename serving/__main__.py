"""The program: `penstock`, and `python -m serving`."""

from __future__ import annotations

import sys

_EXTRA = {
    *("cyclopts", "httptools", "httpx2", "opentelemetry", "prometheus_client", "rich", "starlette", "tokenizers"),
    *("uvicorn", "uvloop", "yaml"),
}
"""The libraries of the extra `serve`."""
_OTHER_EXTRAS = {
    "plotly": "report",
    "zmq": "upstream",
    "nats": "nats",
    **dict.fromkeys(("torch", "transformers", "gguf", "accelerate"), "torch"),
}
"""The extras of libraries that only some commands need."""


def main() -> None:
    """Run the command line; end with one line if a library that it needs is not installed.

    That may come late: other packages bring cyclopts, which is all that the command line itself needs.
    """
    try:
        from .cli import main as run

        run()
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in _EXTRA and library not in _OTHER_EXTRAS:
            raise
        extras = "serve" if library in _EXTRA else f"serve,{_OTHER_EXTRAS[library]}"
        sys.exit(f"penstock: {library} is missing; install the program with: pip install 'penstock[{extras}]'")


if __name__ == "__main__":
    main()
