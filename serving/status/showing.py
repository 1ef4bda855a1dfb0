"""The program of `penstock status`: shows the state of a deployment, once or again and again."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import AsyncGenerator

import anyio
from attrs import asdict

from pipeline import Unavailable
from pipeline.network import Runtime

from ..terminal import echo, table_width
from .gathering import Gatherer
from .overview import Overview

_log = logging.getLogger(__name__)

_EVERY_S = 1.0
"""Between two looks of `--watch`."""


async def show_status(runtime: Runtime, *, watch: bool, as_json: bool, wait_s: float) -> None:
    """Show the state of the deployment of a runtime, which is not open.

    Reports of the workers are awaited for `wait_s`. With `watch` it is shown again whenever it has changed, until
    cancelled; in a terminal in its place. While discovery is away then, which is logged once, the last state stays.
    Raise CannotConnect for a runtime that cannot be reached, and Unavailable if discovery is away at the start.
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
        echo(json.dumps(asdict(overview)))
        return
    from .overview_table import overview_text

    echo(overview_text(overview, table_width()), nl=False)


async def _show_changes(gatherer: Gatherer, as_json: bool) -> None:
    shown: Overview | None = None
    async for overview in _overviews(gatherer):
        if overview != shown:
            _show(overview, as_json)
            shown = overview


async def _show_live(gatherer: Gatherer) -> None:
    from .overview_table import live_overview

    with live_overview() as show:
        async for overview in _overviews(gatherer):
            show(overview)


async def _overviews(gatherer: Gatherer) -> AsyncGenerator[Overview, None]:
    """Yield the state again and again, and nothing while discovery is away."""
    is_away = False
    while True:
        try:
            overview = await gatherer.gather()
        except Unavailable as error:
            if not is_away:
                _log.error("this is no longer up to date: %s", error)
            is_away = True
        else:
            is_away = False
            yield overview
        await anyio.sleep(_EVERY_S)
