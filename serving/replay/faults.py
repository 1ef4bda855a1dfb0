"""Faults: what happens to the workers of a replay, and when; and the sentences and files that describe it.

    worker 3 dies at 120 s, returns at 300 s          [[fault]]
    prefill 0 leaves at 60                            worker = 3
    all restart at 600 s, every 30 s, down 5 s        dies = 120
                                                      returns = 300

A sentence has the grammar:

    [prefill|decode] [worker] N  dies|leaves|returns|restarts [at] TIME, ...      later clauses are about the same
    worker kill|drain|start [prefill] worker N at TIME all [prefill] restart at TIME every TIME [down TIME]

A TIME is a number with ms, s, m or h, without a unit in seconds. To restart is to leave and to return `down` later.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from pipeline import InvalidArgument

from ..settings_file import read_toml
from .samples import Role

_FIELD = "fault"
_DOWN_MS = 10_000.0
"""Default time from leaving to returning."""
_UNITS_MS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([a-z]*)")
_PARTED = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s+(ms|s|sec|seconds|m|min|h)(?!\w)")
_RESTARTS = ("restarts", "restart")
_ROLES: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
_FILLERS = ("workers", "the", "of", "at", "after", "and", "then")
_EXAMPLE = "'worker 3 dies at 120 s, returns at 300 s'"


class Action(StrEnum):
    """What happens to a worker."""

    DIES = "dies"
    """At once, with all its requests."""
    LEAVES = "leaves"
    """It takes no new requests, finishes the running ones and leaves."""
    RETURNS = "returns"
    """It joins again, with an empty cache."""


_ACTIONS = {
    **dict.fromkeys(("dies", "die", "kill", "kills", "killed"), Action.DIES),
    **dict.fromkeys(("leaves", "leave", "drain", "drains"), Action.LEAVES),
    **dict.fromkeys(("returns", "return", "start", "starts"), Action.RETURNS),
}


@frozen
class Fault:
    """One event of one worker."""

    at_ms: float
    worker: int
    """Its number in its pool, from 0."""
    action: Action
    role: Role = "decode"
    """Its pool."""
    place: str = field(default="", eq=False)
    """Where it is written, for errors."""


@frozen
class RollingRestart:
    """Every worker of a pool leaves and returns, one after the other."""

    at_ms: float
    """When the first worker leaves."""
    every_ms: float
    """Between the departures of two workers."""
    down_ms: float
    """From a worker's departure to its return."""
    role: Role = "decode"
    """The pool."""
    place: str = field(default="", eq=False)
    """Where it is written, for errors."""

    def faults(self, workers: int) -> list[Fault]:
        """Return the events of a pool of that many workers, worker 0 first."""
        return [
            Fault(self.at_ms + worker * self.every_ms + later_ms, worker, action, self.role, self.place)
            for worker in range(workers)
            for action, later_ms in ((Action.LEAVES, 0.0), (Action.RETURNS, self.down_ms))
        ]


def plan_faults(
    script: Iterable[Fault | RollingRestart], *, workers: int, prefill_workers: int = 0
) -> tuple[Fault, ...]:
    """Return all faults of a script in order of time, then as written, for pools of these sizes.

    Raise InvalidArgument with the place of an unknown worker, of one that leaves twice, and of one that returns without
    having left.
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


def parse_fault(text: str, place: str = "") -> list[Fault | RollingRestart]:
    """Return the faults of a sentence. Raise InvalidArgument that begins with `place`, default the sentence."""
    place = place or repr(text)
    sentence = _Sentence(place)
    clauses = [clause for clause in re.split(r"[,;]", _PARTED.sub(r"\1\2", text.lower())) if clause.strip()]
    if not clauses:
        raise sentence.wrong("it is empty")
    for clause in clauses:
        sentence.read(clause.split())
    return sentence.finish()


def read_faults(path: str | Path) -> list[Fault | RollingRestart]:
    """Return the faults of a file: tables named `fault` in a `.toml`, else a sentence a line, with `#` comments.

    Raise InvalidArgument that names the file and the line or table.
    """
    file = Path(path)
    if file.suffix.lower() == ".toml":
        return _from_tables(file)
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {error}", field=_FIELD, cause=error) from error
    texts = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    return [one for number, text in texts if text for one in parse_fault(text, f"{path} line {number}")]


@define
class _Sentence:
    """The faults of a sentence, clause by clause."""

    place: str
    worker: int | None = None
    role: Role = "decode"
    all_restart_ms: float | None = None
    every_ms: float | None = None
    down_ms: float | None = None
    found: list[Fault] = field(factory=list)
    restarts: list[Fault] = field(factory=list)
    """Those of `found` that a return follows."""

    def wrong(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self.place}: {what}; write it as {_EXAMPLE}", field=_FIELD)

    def read(self, words: list[str]) -> None:
        """Read one clause, word by word: a role, a worker, then an action and its time."""
        action: str | None = None
        times: list[float] = []
        is_all = self.all_restart_ms is not None
        for word in words:
            if word in _ROLES:
                self.role = _ROLES[word]
            elif word == "all":
                is_all = True
            elif word == "worker":
                self.worker = None
            elif word in _ACTIONS or word in _RESTARTS or word in ("every", "down"):
                if action is not None:
                    self.act(action, times, is_all)
                    times = []
                action = word
            elif (time_ms := _time_ms(word)) is not None:
                if self.worker is None and not is_all and word.isdecimal():
                    self.worker = int(word)
                else:
                    times.append(time_ms)
            elif word not in _FILLERS:
                raise self.wrong(f"{word!r} says nothing")
        self.act(action, times, is_all)

    def act(self, action: str | None, times: list[float], is_all: bool) -> None:
        if action is None:
            raise self.wrong("nothing happens")
        if len(times) != 1:
            raise self.wrong(f"{action!r} needs one time, there are {len(times)}")
        at_ms = times[0]
        if action == "every":
            self.every_ms = at_ms
        elif action == "down":
            self.down_ms = at_ms
        elif is_all:
            if action not in _RESTARTS:
                raise self.wrong(f"all can only restart, not {action!r}")
            self.all_restart_ms = at_ms
        elif self.worker is None:
            raise self.wrong("no worker is named")
        else:
            fault = Fault(at_ms, self.worker, _ACTIONS.get(action, Action.LEAVES), self.role, self.place)
            self.found.append(fault)
            self.restarts += [fault] * (action in _RESTARTS)

    def finish(self) -> list[Fault | RollingRestart]:
        down_ms = _DOWN_MS if self.down_ms is None else self.down_ms
        if self.all_restart_ms is not None:
            if self.every_ms is None:
                raise self.wrong("it does not say how long after each other they restart ('every 30 s')")
            return [RollingRestart(self.all_restart_ms, self.every_ms, down_ms, self.role, self.place)]
        if self.every_ms is not None:
            raise self.wrong("'every' is for all workers")
        if self.down_ms is not None and not self.restarts:
            raise self.wrong("'down' is for a restart")
        back = [evolve(fault, at_ms=fault.at_ms + down_ms, action=Action.RETURNS) for fault in self.restarts]
        return [*self.found, *back]


def _time_ms(word: str) -> float | None:
    match = _TIME.fullmatch(word)
    if match is None or match[2] not in ("", *_UNITS_MS):
        return None
    return float(match[1]) * _UNITS_MS.get(match[2] or "s", 1e3)


def _from_tables(file: Path) -> list[Fault | RollingRestart]:
    document = read_toml(file, _FIELD)
    tables = document.get("fault", [])
    if not isinstance(tables, list) or document.keys() - {"fault"}:
        raise InvalidArgument(f"{file}: has other things than tables named [[fault]]", field=_FIELD)
    return [one for number, table in enumerate(tables, 1) for one in _from_table(table, f"{file} fault {number}")]


def _from_table(table: Any, place: str) -> list[Fault | RollingRestart]:
    """Return the faults of a table: a sentence whose words are keys, worker and role before the actions."""
    if not isinstance(table, Mapping):
        raise InvalidArgument(f"{place}: is not a table", field=_FIELD)
    known = {"worker", "role", "dies", "leaves", "returns", "restarts", "every", "down"}
    unknown = sorted(table.keys() - known)
    if unknown:
        raise InvalidArgument(f"{place}: {unknown[0]!r} is not one of {', '.join(sorted(known))}", field=_FIELD)
    subject = [_word(table["role"], place)] if "role" in table else []
    subject.append("all" if table.get("worker") == "all" else _whole(table.get("worker"), place))
    clauses = [f"{key} {_word(value, place)}" for key, value in table.items() if key not in ("worker", "role")]
    return parse_fault(" ".join([*subject, ", ".join(clauses)]), place)


def _whole(value: Any, place: str) -> str:
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"{place}: worker is a number from 0 on or 'all', not {value!r}", field=_FIELD)
    return str(value)


def _word(value: Any, place: str) -> str:
    if type(value) in (int, float, str) and not (isinstance(value, str) and re.search("[,;]", value)):
        return str(value)
    raise InvalidArgument(f"{place}: {value!r} is no time", field=_FIELD)


def parse_faults(texts: Iterable[str]) -> list[Fault | RollingRestart]:
    """Return the faults of sentences, or of files as `@PATH`; the place of each is its number from 1."""
    found: list[Fault | RollingRestart] = []
    for number, text in enumerate(texts, 1):
        found += read_faults(text[1:]) if text.startswith("@") else parse_fault(text, f"fault {number} ({text!r})")
    return found
