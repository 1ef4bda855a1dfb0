"""Faults: what happens to the workers of a replay, and when.

A fault is a sentence, or a table of a TOML file that says the same:

    worker 3 dies at 120 s, returns at 300 s          [[fault]]
    prefill 0 leaves at 60                            worker = 3
    all restart at 600 s, every 30 s, down 5 s        dies = 120
                                                      returns = 300
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum

from attrs import field, frozen

from pipeline import InvalidArgument

from .samples import Role


class Action(StrEnum):
    """What happens to a worker."""

    DIES = "dies"
    """At once, with all it is doing."""
    LEAVES = "leaves"
    """It takes nothing new, finishes what it has and is gone."""
    RETURNS = "returns"
    """It is there again, and has cached nothing."""


@frozen
class Fault:
    """One thing that happens to one worker, by its number from 0 in its pool. `place` is where it was written."""

    at_ms: float
    worker: int
    action: Action
    role: Role = "decode"
    place: str = field(default="", eq=False)


@frozen
class RollingRestart:
    """Every worker of a pool leaves and returns, one after the other."""

    at_ms: float
    every_ms: float
    down_ms: float
    role: Role = "decode"
    place: str = field(default="", eq=False)

    def faults(self, workers: int) -> list[Fault]:
        """Worker 0 leaves first, the next `every_ms` later; each returns `down_ms` after it was told to leave."""
        found = []
        for worker in range(workers):
            at_ms = self.at_ms + worker * self.every_ms
            found.append(Fault(at_ms, worker, Action.LEAVES, self.role, self.place))
            found.append(Fault(at_ms + self.down_ms, worker, Action.RETURNS, self.role, self.place))
        return found


def plan_faults(
    script: Iterable[Fault | RollingRestart], *, workers: int, prefill_workers: int = 0
) -> tuple[Fault, ...]:
    """All faults of a script in order, for so many workers. Those at the same time come as they were written.

    Raises InvalidArgument that names the place of a worker that is not there, of one that goes twice, and of one that
    returns before it went.
    """
    sizes: dict[Role, int] = {"decode": workers, "prefill": prefill_workers}
    faults: list[Fault] = []
    for one in script:
        faults += one.faults(sizes[one.role]) if isinstance(one, RollingRestart) else [one]
    ordered = sorted(faults, key=lambda fault: fault.at_ms)
    gone: defaultdict[tuple[Role, int], bool] = defaultdict(bool)
    for fault in ordered:
        _check(fault, sizes[fault.role], gone[fault.role, fault.worker])
        gone[fault.role, fault.worker] = fault.action is not Action.RETURNS
    return tuple(ordered)


def _check(fault: Fault, workers: int, is_gone: bool) -> None:
    name = f"{'prefill ' if fault.role == 'prefill' else ''}worker {fault.worker}"
    what = ""
    if not 0 <= fault.worker < workers:
        what = f"there is no {name}: they are numbered from 0 to {workers - 1}" if workers else f"there is no {name}"
    elif not 0 <= fault.at_ms < math.inf:
        what = f"{fault.at_ms / 1000:g} s is no time of a replay"
    elif is_gone and fault.action is not Action.RETURNS:
        what = f"{name} {fault.action} at {fault.at_ms / 1000:g} s, but is gone already"
    elif not is_gone and fault.action is Action.RETURNS:
        what = f"{name} returns at {fault.at_ms / 1000:g} s, but is there"
    if what:
        raise InvalidArgument(f"{fault.place}: {what}" if fault.place else what, field="fault")
