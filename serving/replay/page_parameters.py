"""What a parameter of a sweep does: figures over its values, a line for each combination of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import page_axes
from .page_axes import Axis
from .page_figures import figure_named, value_of
from .page_lines import Line
from .page_svg import Frame, dot, figure, legend, style
from .page_text import number
from .report import Report
from .sweeping import SweepRun, label_of, text_of

FIGURES = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "prefix_cache_reused_ratio")


def varied_of(runs: Sequence[SweepRun]) -> list[str]:
    """The parameters of which there is more than one value, in their order."""
    names = dict.fromkeys(name for run in runs for name in run.parameters)
    return [name for name in names if len(_values(name, runs)) > 1]


def parameter_charts(name: str, runs: Mapping[str, SweepRun], reports: Mapping[str, Report]) -> list[str]:
    """A chart for each of FIGURES that some run has. Runs without the parameter are a level line."""
    values = _values(name, list(runs.values()))
    return [chart for one in FIGURES if (chart := _chart(name, values, one, runs, reports))]


def _values(name: str, runs: Sequence[SweepRun]) -> list[Any]:
    """Numbers by size, anything else as it comes."""
    found = {text_of(run.parameters[name]): run.parameters[name] for run in runs if name in run.parameters}
    numbers = {text: number for text, value in found.items() if (number := _as_number(value)) is not None}
    return [found[text] for text in (sorted(numbers, key=numbers.__getitem__) if len(numbers) == len(found) else found)]


def _as_number(value: Any) -> float | None:
    """Arguments of an engine are texts."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _chart(
    name: str, values: Sequence[Any], figure_name: str, runs: Mapping[str, SweepRun], reports: Mapping[str, Report]
) -> str:
    known = figure_named(figure_name)
    lines = _lines(name, values, figure_name, runs, reports)
    heights = [value for line in lines for _, value in line.points if value is not None]
    if not heights:
        return ""
    title = f"{known.label} by {name}"
    frame = Frame.of(_axis(name, values), page_axes.latency(heights, ""))
    marks = []
    for at, line in enumerate(lines):
        marks.append(f'<path class="line {style(at)}" d="{frame.path(line.points)}"/>\n')
        marks += [
            dot(frame, x, y, at, f"{line.label or 'all runs'}, {text_of(values[int(x)])}: {number(y)}")
            for x, y in line.points
            if y is not None and frame.y.shows(y)
        ]
    said = "; ".join(
        f"{line.label or 'all runs'}: "
        + ", ".join(f"{number(y)} at {text_of(values[int(x)])}" for x, y in line.points if y is not None)
        for line in lines
    )
    key = legend([line.label for line in lines]) if len(lines) > 1 else ""
    return figure(title, frame.svg(title, said, *marks), key=key)


def _lines(
    name: str, values: Sequence[Any], figure_name: str, runs: Mapping[str, SweepRun], reports: Mapping[str, Report]
) -> list[Line]:
    others = [one for one in varied_of(list(runs.values())) if one != name]
    places = {text_of(value): float(at) for at, value in enumerate(values)}
    lines: dict[str, Line] = {}
    for run_name, report in reports.items():
        given = runs[run_name].parameters
        label = label_of({one: given[one] for one in others if one in given})
        height = value_of(report, figure_named(figure_name), report.to_plain())
        at = [places[text_of(given[name])]] if name in given else list(places.values())
        lines.setdefault(label, Line(label, [])).points.extend((x, height) for x in at)
    for line in lines.values():
        line.points.sort(key=lambda point: point[0])
    return list(lines.values())


def _axis(name: str, values: Sequence[Any]) -> Axis:
    """One place for each value, equally far apart, with some room at both ends."""
    room = 0.04 * (len(values) - 1)
    ticks = tuple((float(at), text_of(value)) for at, value in enumerate(values))
    return Axis(-room, len(values) - 1 + room, ticks, name)
