"""Pickers: which of several instances gets a request.

A picker is a function of the candidates (sorted, at least one), their loads, the request and a random.Random, and
returns one of the candidates. It changes nothing and draws from that Random only, so that a seed repeats it. A picker
with state, as `RoundRobin`, is a class whose `peek` takes the same arguments and leaves the state as it is.

Source: dynamo lib/runtime/src/pipeline/network/egress/push_router.rs. Other than there, a load that does not matter to
a mode is counted all the same, and the ratio of the device-aware mode is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeAlias

from pipeline import AnyContext, InvalidArgument
from pipeline.settings import Variable, whole

from .load import WorkerLoad

Loads: TypeAlias = Mapping[int, WorkerLoad]
Picker: TypeAlias = Callable[[Sequence[int], Loads, AnyContext, Random], int]

CUDA_TO_CPU_RATIO = 8
DEVICE_RATIO = Variable(
    "DYN_ENCODER_CUDA_TO_CPU_RATIO",
    CUDA_TO_CPU_RATIO,
    "CPUs that an accelerator counts for under the router device-aware.",
    lambda text: max(1, whole()(text)),
)


class Uncounted(int):
    """A choice that costs the instance nothing: the request is not counted as in flight there."""


class RoundRobin:
    """Pick one after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def peek(self, candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
        """Return the candidate whose turn is next."""
        return candidates[self._turn % len(candidates)]

    def __call__(self, candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
        chosen = candidates[self._turn % len(candidates)]
        self._turn += 1
        return chosen

    def give_back(self) -> None:
        """Undo one turn."""
        self._turn -= 1


def random_pick(candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
    """Pick any candidate, each as likely as the others."""
    return rng.choice(candidates)


def power_of_two(candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
    """Draw two candidates, pick the one with less in flight, the first if they are equal."""
    count = len(candidates)
    if count == 1:
        return candidates[0]
    first, second = rng.randrange(count), rng.randrange(count - 1)
    second += second >= first
    one, other = candidates[first], candidates[second]
    return one if _in_flight(loads, one) <= _in_flight(loads, other) else other


def least_loaded(candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
    """Pick a candidate with the least in flight, each such as likely as the others."""
    counts = [_in_flight(loads, instance_id) for instance_id in candidates]
    least = min(counts)
    ties = [instance_id for instance_id, count in zip(candidates, counts, strict=True) if count == least]
    return ties[0] if len(ties) == 1 else rng.choice(ties)


class DeviceAware:
    """Fill CPU and accelerator instances in proportion, and pick the least loaded of the group.

    A CPU gets a request only while all CPUs together have less in flight than their share. An instance whose device is
    not known counts as an accelerator.

    cuda_to_cpu_ratio: the number of CPUs an accelerator counts for
    holds_media: whether an instance has everything the request needs in its cache; such an instance is picked first,
        and the request is not counted there
    """

    def __init__(
        self,
        cuda_to_cpu_ratio: int = CUDA_TO_CPU_RATIO,
        holds_media: Callable[[int, AnyContext], bool] | None = None,
    ) -> None:
        if cuda_to_cpu_ratio < 1:
            raise InvalidArgument(f"must be at least 1, got {cuda_to_cpu_ratio}", field="cuda_to_cpu_ratio")
        self.cuda_to_cpu_ratio = cuda_to_cpu_ratio
        self.holds_media = holds_media

    def __call__(self, candidates: Sequence[int], loads: Loads, request: AnyContext, rng: Random) -> int:
        if self.holds_media is not None:
            holders = [instance_id for instance_id in candidates if self.holds_media(instance_id, request)]
            if holders:
                return Uncounted(least_loaded(holders, loads, request, rng))
        cpus, accelerators = by_device(candidates, loads)
        if not cpus or not accelerators:
            return least_loaded(candidates, loads, request, rng)
        share = (
            sum(_in_flight(loads, instance_id) for instance_id in accelerators)
            * len(cpus)
            // (self.cuda_to_cpu_ratio * len(accelerators))
        )
        has_room = sum(_in_flight(loads, instance_id) for instance_id in cpus) < share
        return least_loaded(cpus if has_room else accelerators, loads, request, rng)


def by_device(candidates: Sequence[int], loads: Loads) -> tuple[list[int], list[int]]:
    """Return the candidates that are CPUs, and the others."""
    cpus: list[int] = []
    others: list[int] = []
    for instance_id in candidates:
        load = loads.get(instance_id)
        (cpus if load is not None and load.device_type == "cpu" else others).append(instance_id)
    return cpus, others


def _in_flight(loads: Loads, instance_id: int) -> int:
    load = loads.get(instance_id)
    return 0 if load is None else load.in_flight
