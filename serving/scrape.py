"""Metrics of several processes as one text, each sample with the name of its process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
from attrs import frozen

from pipeline.extras import brought_by
from pipeline.telemetry import merged, with_labels

with brought_by("serve", by="serving.scrape"):
    import httpx2

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
"""A process that does not answer within this is left out."""


@frozen
class Scrape:
    """Where the metrics of a process are."""

    name: str
    """Of the process: the label `process` of its samples."""
    url: str
    """Of its metrics as Prometheus text."""


async def scraped_text(scrapes: Sequence[Scrape]) -> str:
    """Return the metrics of all processes that answer, each family once."""
    texts: dict[str, str] = {}
    async with httpx2.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client, anyio.create_task_group() as tasks:
        for each in scrapes:
            tasks.start_soon(_scrape, each, client, texts)
    return merged(texts[each.name] for each in scrapes if each.name in texts)


async def _scrape(scrape: Scrape, client: httpx2.AsyncClient, texts: dict[str, str]) -> None:
    try:
        with anyio.fail_after(_TIMEOUT_S):
            response = await client.get(scrape.url)
        response.raise_for_status()
    except (httpx2.HTTPError, TimeoutError) as error:
        _log.warning("%s gives no metrics: %s", scrape.name, error or type(error).__name__)
        return
    texts[scrape.name] = with_labels(response.text, {"process": scrape.name})
