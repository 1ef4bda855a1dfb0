"""Plan: everything about a prefill that is decided before it is sent."""

from __future__ import annotations

from random import Random

from attrs import frozen

from pipeline import Context, InvalidArgument
from pipeline.protocols import BootstrapInfo, PreprocessedRequest, RoutingConstraints

from .activation import Configs
from .bootstrap import new_meeting
from .errors import backpressure
from .pool import PrefillPool
from .requests import prefill_request
from .resolve import Backpressure, NoBootstrapEndpoint, PrefillWorker, Resolved, named_worker, resolve
from .topology import transfer_constraints


@frozen
class Plan:
    """The prefill's request; its worker, and where decode meets it, where they are known; what decode must keep to."""

    prefill: PreprocessedRequest
    worker: PrefillWorker | None = None
    meeting: BootstrapInfo | None = None
    constraints: RoutingConstraints | None = None
    was_chosen: bool = False
    """Whether the worker is our choice, not the caller's."""


def make_plan(
    request: Context[PreprocessedRequest], pool: PrefillPool, is_activated: bool, configs: Configs, rng: Random
) -> Plan:
    """Decides; of the pool, only whose turn it is may change, once, and only if nothing is raised.

    Where it cannot be said who prefills, the prefill router will say. Raises ResourceExhausted, TopologyError, and
    InvalidArgument for a request that has to name its worker and does not.
    """
    payload = request.payload
    named = named_worker(payload.routing)
    if pool.is_direct and named is None:
        raise InvalidArgument(
            "in direct mode a request names its prefill worker: whoever routes from outside sets prefill_worker_id "
            "(header x-dynamo-prefill-instance-id, formerly x-prefill-instance-id), and this request has none",
            field="routing.prefill_worker_id",
        )
    found = pool.find(request) if named is None else None
    resolution = resolve(is_activated, named, found, configs)
    if isinstance(resolution, Backpressure):
        raise backpressure(resolution.refusal)
    if not isinstance(resolution, Resolved | NoBootstrapEndpoint):
        return Plan(prefill_request(payload), constraints=transfer_constraints(configs, None))
    worker = resolution.worker
    constraints = transfer_constraints(configs, worker.worker_id)
    if named is None:
        pool.take(request)
    meeting = None
    if isinstance(resolution, Resolved):
        meeting = new_meeting(resolution.host, resolution.port, worker.dp_rank, resolution.dp_size, rng)
    return Plan(prefill_request(payload, worker, meeting), worker, meeting, constraints, was_chosen=named is None)
