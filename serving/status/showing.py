"""The program of `penstock status`: shows the state of a deployment, once or again and again."""

from __future__ import annotations

import json
import sys

import anyio
from attrs import asdict

from pipeline.network import Runtime

from ..terminal import echo, table_width
from .gathering import Gatherer
from .overview import Overview

_EVERY_S = 1.0
"""Between two looks of `--watch`."""


async def show_status(runtime: Runtime, *, watch: bool, as_json: bool, wait_s: float) -> None:
    """Show the state of the deployment of a runtime, which is not open.

    Reports of the workers are awaited for `wait_s`. With `watch` it is shown again whenever it has changed, until
    cancelled; in a terminal in its place. Raise CannotConnect for a runtime that cannot be reached.
    """
    async with runtime:
        with Gatherer(runtime) as gatherer:
            await gatherer.gather()  # which begins to collect reports
            await anyio.sleep(wait_s)
            if not watch:
                _show(await gatherer.gather(), as_json)
            elif sys.stdout.isatty() and not as_json:
                await _show_live(gatherer)
            else:
                await _show_changes(gatherer, as_json)


def _show(overview: Overview, as_json: bool) -> None:
    if as_json:
        echo(json.dumps(asdict(overview), ensure_ascii=False))
        return
    from .overview_table import overview_text

    echo(overview_text(overview, table_width()), nl=False)


async def _show_changes(gatherer: Gatherer, as_json: bool) -> None:
    shown: Overview | None = None
    while True:
        overview = await gatherer.gather()
        if overview != shown:
            _show(overview, as_json)
            shown = overview
        await anyio.sleep(_EVERY_S)


async def _show_live(gatherer: Gatherer) -> None:
    from .overview_table import live_overview

    with live_overview() as show:
        while True:
            show(await gatherer.gather())
            await anyio.sleep(_EVERY_S)
