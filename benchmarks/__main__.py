"""`make bench`: measures, prints a table, writes the same as JSON.

python -m benchmarks [--json FILE] [--only items|graph|disaggregation|engines|kv-index|kv-choice|kv-queue]

What routing does to conversations is another table: python -m benchmarks.conversations. What a request costs by the
number of workers is a picture: python -m benchmarks.scaling.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table

from . import disaggregation, engines, graph, items, kv_choice, kv_index, kv_queue
from .measure import Result

PARTS = {
    "items": items.measure,
    "graph": graph.measure,
    "disaggregation": disaggregation.measure,
    "engines": engines.measure,
    "kv-index": kv_index.measure,
    "kv-choice": kv_choice.measure,
    "kv-queue": kv_queue.measure,
}


def _table(results: list[Result]) -> Table:
    table = Table(title=f"Penstock on Python {platform.python_version()}, {platform.machine()}")
    for column in ("measured", "value", "floor", "ratio", "budget"):
        table.add_column(column, justify="left" if column in ("measured", "budget") else "right")
    for result in results:
        floor = f"{result.floor:.2f} {result.unit}" if result.floor else ""
        ratio = f"{result.ratio:.2f}" if result.ratio is not None else ""
        table.add_row(result.name, f"{result.value:.2f} {result.unit}", floor, ratio, result.budget)
    return table


async def _measure(parts: list[str]) -> list[Result]:
    return [result for part in parts for result in await PARTS[part]()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures Penstock against its floors.")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where the figures are written")
    parser.add_argument("--only", choices=list(PARTS), help="one part of the benchmark")
    arguments = parser.parse_args()
    parts = [arguments.only] if arguments.only else list(PARTS)
    results = anyio.run(_measure, parts, backend_options={"use_uvloop": True})
    Console(width=120).print(_table(results))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps([result.as_dict() for result in results], indent=2) + "\n")
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
