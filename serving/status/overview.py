"""Overview: the processes of a deployment at one moment, as records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen

from pipeline.network import Instance, Model
from pipeline.protocols.kv import ActiveLoad

from .process_status import FRONTENDS_AT, ProcessStatus, status_endpoint


@frozen
class WorkerRow:
    """One worker. What is not known of it is None."""

    instance: str
    """Its id in hex."""
    endpoint: str
    """Where it is registered."""
    role: str
    """aggregated, decode, prefill or encode."""
    model: str
    """Its model for clients; empty while its card is not there."""
    address: str
    """Where other processes reach it."""
    streams: int | None = None
    """Requests that run; None: it does not answer."""
    decode_blocks: int | None = None
    """KV blocks of running requests, of all its ranks."""
    prefill_tokens: int | None = None
    """Tokens of prompts that are not computed yet."""
    kv_used_blocks: int | None = None
    """KV blocks in use, cached ones included."""
    kv_total_blocks: int | None = None
    """KV blocks that it has."""


@frozen
class FrontendRow:
    """One front end."""

    instance: str
    """Its id in hex."""
    url: str
    """For clients; empty if it does not answer."""
    streams: int | None = None
    """Requests that run; None: it does not answer."""
    models: list[str] = field(factory=list)
    """What it serves."""


@frozen
class Overview:
    """All processes that are registered."""

    workers: list[WorkerRow] = field(factory=list)
    """By role, model and endpoint."""
    frontends: list[FrontendRow] = field(factory=list)
    """By their URL."""


Loads = Mapping[int, Iterable[ActiveLoad]]
"""The last report of each rank, by the id of its worker."""


def overview_of(
    instances: Iterable[Instance], models: Iterable[Model], loads: Loads, answers: Mapping[str, ProcessStatus]
) -> Overview:
    """Return the processes that serve models, and the front ends.

    `answers` are those of processes by the key of their instance at the endpoint for it.
    """
    present = {each.key: each for each in instances}
    cards = {one.key: one for one in models if one.suffix is None}
    workers = [
        _worker(present[key], one, loads.get(one.instance_id, ()), answers.get(_status_key(present[key])))
        for key, one in cards.items()
        if key in present
    ]
    frontends = [_frontend(each, answers.get(key)) for key, each in present.items() if each.endpoint_id == FRONTENDS_AT]
    return Overview(
        sorted(workers, key=lambda row: (row.role, row.model, row.endpoint, row.instance)),
        sorted(frontends, key=lambda row: (row.url, row.instance)),
    )


def _status_key(instance: Instance) -> str:
    return Instance.of(status_endpoint(instance.endpoint_id), instance.instance_id).key


def _worker(instance: Instance, model: Model, loads: Iterable[ActiveLoad], answer: ProcessStatus | None) -> WorkerRow:
    card, reports = model.card, list(loads)
    return WorkerRow(
        f"{instance.instance_id:x}",
        instance.endpoint_id.path,
        str(card.worker_type or "aggregated"),
        card.display_name,
        instance.transport.get("tcp", ""),
        None if answer is None else answer.streams,
        _sum(each.active_decode_blocks for each in reports),
        _sum(each.active_prefill_tokens for each in reports),
        _sum(each.kv_used_blocks for each in reports),
        card.runtime_config.total_kv_blocks,
    )


def _frontend(instance: Instance, answer: ProcessStatus | None) -> FrontendRow:
    name = f"{instance.instance_id:x}"
    return FrontendRow(name, "") if answer is None else FrontendRow(name, answer.url, answer.streams, answer.models)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
