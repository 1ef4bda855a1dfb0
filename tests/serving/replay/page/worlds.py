"""Reports of made-up replays, and what a browser reads in a page."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from html.parser import HTMLParser
from random import Random
from typing import Any

import plotly.graph_objects as go  # type: ignore[import-untyped]
from attrs import define, field
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from serving.replay import Report, Samples, make_report
from serving.replay.samples import Status

VOID = {"meta", "br"}


@define
class ShownChart:
    """A chart of a page: what it is drawn from, and what is written at it."""

    figure: dict[str, Any]
    """Data and layout, as the script of the page gives them to plotly."""
    label: str
    """The description for readers that cannot see the chart."""
    note: str

    @property
    def traces(self) -> dict[str, dict[str, Any]]:
        """The series by their names in the legend."""
        return {one.get("name", ""): one for one in self.figure["data"]}

    @property
    def layout(self) -> dict[str, Any]:
        layout: dict[str, Any] = self.figure["layout"]
        return layout


@define
class ShownPage(HTMLParser):
    """The elements, texts and charts of a page. Fails where an element is not closed as it was opened."""

    page: str
    tags: list[str] = field(factory=list)
    texts: list[tuple[str, str]] = field(factory=list)
    """Each text with the element around it."""
    attributes: list[tuple[str, str, str]] = field(factory=list)
    charts: dict[str, ShownChart] = field(factory=dict)
    """By title."""
    _open: list[str] = field(factory=list)
    _title: str = ""
    _note: str = ""
    _label: str = ""
    _in_chart: bool = False

    def __attrs_post_init__(self) -> None:
        HTMLParser.__init__(self)
        self.feed(self.page.replace(get_plotlyjs(), ""))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in given.items()]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "figure":
            self._title = self._note = ""
        if given.get("class") == "chart":
            self._label = given["aria-label"]
        self._in_chart = tag == "script" and given.get("type") == "application/json"

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._in_chart = False

    def handle_data(self, data: str) -> None:
        if self._in_chart:
            figure = json.loads(data)
            go.Figure(figure)  # raises for a property that plotly does not have
            assert self._title not in self.charts or self._open.count("details")
            self.charts.setdefault(self._title, ShownChart(figure, self._label, self._note))
        elif data.strip() and self._open:
            text, around = data.strip(), self._open[-1]
            self.texts.append((around, text))
            if around == "strong" and "figcaption" in self._open:
                self._title = text
            elif around == "span" and "figcaption" in self._open:
                self._note = text

    def of(self, tag: str) -> list[str]:
        return [text for around, text in self.texts if around == tag]


@lru_cache(maxsize=4)
def charts_of(page: str) -> dict[str, ShownChart]:
    """Return the charts of a page by title; of several with one title, the first."""
    return ShownPage(page).charts


def cells(page: str, row: str) -> list[str]:
    """Return the text of the cells of the first row with this heading."""
    found = re.search(rf'<th scope="row">{re.escape(row)}</th>(.*?)</tr>', page)
    assert found is not None, row
    return [re.sub("<[^>]+>", "", cell) for cell in re.findall("<td>(.*?)</td>", found[1])]


def made(
    seed: int = 1,
    *,
    requests: int = 60,
    workers: int = 2,
    prefill: int = 0,
    slow: float = 1.0,
    per_request: bool = False,
    **settings: Any,
) -> Report:
    """Return the report of random requests; `slow` multiplies their times. `settings` are shown, and change nothing."""
    random, samples = Random(seed), Samples()
    for worker in range(workers):
        samples.worker_joined(worker, 0)
    for worker in range(prefill):
        samples.worker_joined(worker, 0, "prefill")
    now = 0.0
    for at in range(requests):
        now += random.expovariate(1 / 1500)
        sample = samples.arrived(f"r{at}", now, input_tokens=random.randrange(1, 9000))
        if prefill:
            sample.routed(random.randrange(prefill), now, "prefill")
        sample.routed(random.randrange(workers), now + 2)
        sample.cached_tokens = sample.input_tokens // random.randrange(1, 9)
        token = now + 2 + slow * (sample.input_tokens - sample.cached_tokens) * 0.05
        for _ in range(random.randrange(1, 40)):
            sample.tokens(token)
            token += slow * random.lognormvariate(2, 0.4)
        samples.ended(sample, token, Status.FAILED if at % 29 == 28 else Status.COMPLETED)
    return make_report(samples, settings={"router": "kv", "workers": workers, **settings}, per_request=per_request)
