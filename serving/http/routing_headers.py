"""The routing of a request in headers of its answer, for any client.

    x-penstock-worker: 205ac7b9fd5f1                 the worker, in hex as in metrics, logs and `/health`
    x-penstock-prefill-worker: 205ac7b9fd5f0         where another one computed the prompt
    x-penstock-router: rule=cost; candidates=4; overlap_blocks=3; best_overlap_blocks=5; prompt_blocks=8; cost=12.5
    x-penstock-prefill-router: ...                   the same of the prefill worker
    x-penstock-attempts: 2                           workers it was sent to, one after the other

A request for `router_decision` gets the same in `nvext`. Unknown values are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve, fields

from pipeline.protocols import RequestTracker, RouterChoice, worker_label
from pipeline.protocols.openai import QUERY_INSTANCE_ID, NvExt

from ..problems import Refusal

Headers = list[tuple[bytes, bytes]]

WORKER = b"x-penstock-worker"
PREFILL_WORKER = b"x-penstock-prefill-worker"
ROUTER = b"x-penstock-router"
PREFILL_ROUTER = b"x-penstock-prefill-router"
ATTEMPTS = b"x-penstock-attempts"

_SHOWN_MAX = 16
"""Workers in a header: a list of prompts may have 128."""
_ROUTING_FIELDS = frozenset({"worker_id", "router_decision"})
_ROUTING_ANNOTATIONS = frozenset({"router_decision"})
_CHOICE_FIELDS = tuple(field.name for field in fields(RouterChoice))


def decision_headers(trackers: Sequence[RequestTracker]) -> Headers:
    """Return the headers of an answer whose prompts have these trackers.

    Each worker is named once; the choices are those of the first prompt.
    """
    if not trackers:
        return []
    headers: Headers = []
    workers = [tracker.decode_worker.worker_id for tracker in trackers]
    prefill = [tracker.prefill_worker.worker_id for tracker in trackers]
    if known := _labels(workers):
        headers.append((WORKER, known))
    if prefill != workers and (known := _labels(prefill)):
        headers.append((PREFILL_WORKER, known))
    first = trackers[0]
    decode_choice, prefill_choice = first.decode_worker.choice, first.prefill_worker.choice
    if decode_choice is not None:
        headers.append((ROUTER, _choice_text(decode_choice)))
    if prefill_choice is not None and prefill_choice is not decode_choice:
        headers.append((PREFILL_ROUTER, _choice_text(prefill_choice)))
    if headers:
        headers.append((ATTEMPTS, b"%d" % max(tracker.attempts for tracker in trackers)))
    return headers


def workers_of(trackers: Sequence[RequestTracker]) -> str:
    """Return the workers that answer, each once, with commas between them."""
    return _labels(tracker.decode_worker.worker_id for tracker in trackers).decode()


def without_routing(nvext: NvExt | None) -> NvExt | None:
    """Return the extension without the fields that would show the client its workers.

    Raise Refusal (403) for a request that only wants to know its worker.
    """
    if nvext is None:
        return None
    annotations = nvext.annotations or []
    if any(text.startswith(f"{QUERY_INSTANCE_ID}:") for text in annotations):
        raise Refusal(403, "This server does not show its workers", "validation")
    extra_fields = _without(nvext.extra_fields, _ROUTING_FIELDS)
    return evolve(nvext, extra_fields=extra_fields, annotations=_without(nvext.annotations, _ROUTING_ANNOTATIONS))


def _without(names: list[str] | None, hidden: frozenset[str]) -> list[str] | None:
    return None if names is None else [name for name in names if name not in hidden]


def _labels(worker_ids: Iterable[int | None]) -> bytes:
    known = list(dict.fromkeys([worker_id for worker_id in worker_ids if worker_id is not None]))
    return ",".join(map(worker_label, known[:_SHOWN_MAX])).encode()


def _choice_text(choice: RouterChoice) -> bytes:
    known: list[str] = []
    for name in _CHOICE_FIELDS:
        value: float | str | None = getattr(choice, name)
        if value is not None:
            known.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return "; ".join(known).encode("ascii", "replace")
