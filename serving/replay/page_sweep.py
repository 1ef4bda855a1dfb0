"""The page of a sweep: which runs no other beats, and how cost grows with workers.

Path("sweep.html").write_text(pareto_page(reports_by_name))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .page import document
from .page_figures import comparison
from .page_pareto import pareto_figure, sweep_points
from .page_scaling import scaling_figure, scaling_of
from .page_text import folded
from .report import Report

PAIRS = (
    ("mean_ttft_ms", "output_throughput_tok_s"),
    ("p99_ttft_ms", "prefix_cache_reused_ratio"),
)
"""What is drawn against what: figures by their names in JSON."""
_COST = "ms of the machine a request"


def pareto_page(
    runs: Mapping[str, Report],
    *,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    group: str = "router",
    scaling: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    cost_label: str = _COST,
) -> str:
    """A chart for each pair of figures, its Pareto front marked; `group` names the setting that gives the colour.

    `scaling` are lines of workers and cost; without it, what a request took the machine, where runs were timed.
    Raises InvalidArgument for a figure none of the runs has. The same runs give the same page, byte for byte.
    """
    charts = [pareto_figure(sweep_points(runs, x, y, group), x, y) for x, y in pairs]
    lines = scaling_of(runs, group) if scaling is None else scaling
    parts = [f"<section>\n<h2>Which runs no other beats</h2>\n{''.join(charts)}</section>\n"]
    if lines:
        parts.append(f"<section>\n<h2>Cost by workers</h2>\n{scaling_figure(lines, cost_label)}</section>\n")
    if runs:
        parts.append(f"<section>\n<h2>All figures</h2>\n{folded('every run', comparison(runs))}</section>\n")
    return document("Penstock replay: sweep", f"{len(runs):,} runs", "".join(parts))
