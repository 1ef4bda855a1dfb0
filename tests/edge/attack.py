"""One attack as data, how it is carried out, and its outcome.

    Attack("quotes", post(b'"' * 4_000_000), statuses={400})

An attack is carried out beside a probe that requests `/live`. It is repelled if the server gave a clear answer or cut
the connection, other clients did not wait, memory stayed below the bound, and nothing of the attack is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from attrs import evolve, field, frozen

from .server import EdgeServer
from .wire import CUT, OPEN, Answer, Client

Act = Callable[[Client], Sequence[Answer]]
"""Carries out an attack with a client, and returns the answers."""

Engine = Literal["mock", "echo", "tokens"]

STALL_S = 0.050
"""How long other clients may wait."""
NOISE = 3
"""Multiple of the longest wait without an attack that is allowed: the machine may be busy."""
BLOCKED = 4
"""Multiple of the allowed wait from which the server failed, even if it did not work that long meanwhile."""
TRIES = 3
"""How often an attack with too long a stall is repeated: a disturbance of the machine does not come three times."""
QUIET_S = 0.25
SETTLE_S = 8.0
"""How long the server may take to release everything of an attack."""
KEPT_MB = 48.0
"""Memory that an allocator may keep once an attack is over."""
ERROR_BYTES = 4096
"""The longest body of an error."""

NOT_MINE = frozenset({400, 404, 405, 408, 411, 413, 414, 415, 417, 422, 429, 431, 501, 503, 505, 529})
"""Statuses of a refusal."""


@frozen
class Attack:
    """One attack, and the outcomes that count as repelled."""

    name: str
    act: Act
    """Carries it out, and returns the answers."""
    statuses: Collection[int] = NOT_MINE
    """Allowed statuses of each answer; with `CUT` the connection may be closed without one."""
    memory_mb: float = 48
    """Memory by which the server may grow meanwhile."""
    limits: Mapping[str, float] = field(factory=dict)
    """Limits of the server, by the names of `limits.VARIABLES`."""
    engine: Engine = "mock"
    """The mock engine, the echo engine, or the echo engine behind a tokenizer and a chat template."""
    is_smuggled: bool = False
    """Whether a second answer would be that of a hidden request."""
    is_slow: bool = False
    """Whether it is of full size, and takes a while."""
    stall_s: float = STALL_S
    """How long other clients may wait; more only for attacks like as many ordinary requests at once."""
    group: str = ""
    """Attacks of one group end at once; they are carried out one after the other under one probe."""


@frozen
class Outcome:
    """The outcome of an attack. Times in seconds, memory in MB."""

    answers: Sequence[Answer]
    quiet_s: float
    """The longest answer of the probe before the attack."""
    stall_s: float
    """The longest answer of the probe during it and until the server answered again."""
    took_s: float
    worked_s: float
    """The longest part of such an answer in which the server worked; the rest is the machine's, which others use."""
    grown_mb: float
    kept_mb: float
    left_open: str
    """What was not released, empty if everything was."""

    @property
    def statuses(self) -> str:
        counted: dict[int, int] = {}
        for each in self.answers:
            counted[each.status] = counted.get(each.status, 0) + 1
        words = {CUT: "cut", OPEN: "open"}
        return ", ".join(f"{words.get(s, str(s))}{f' x {n}' if n > 1 else ''}" for s, n in sorted(counted.items()))


def carry_out(attack: Attack, server: EdgeServer) -> Outcome:
    """Carry the attack out once; it ends with all its connections closed."""
    client = Client(server.host, server.port)
    sockets, before_mb = server.sockets(), server.rss_mb()
    with server.probed() as probe:
        time.sleep(QUIET_S)
        server.forget_peak()
        begun = time.monotonic()
        try:
            answers = attack.act(client)
        finally:
            client.close()
        ended = time.monotonic()
        time.sleep(0.1)
        left_open = _left_open(server, sockets + 1)
        over = time.monotonic()
    peak_mb = server.peak_mb()
    return Outcome(
        answers,
        quiet_s=probe.longest_s(0, begun),
        stall_s=probe.longest_s(begun, over),
        took_s=ended - begun,
        worked_s=probe.longest_worked_s(begun, over),
        grown_mb=peak_mb - before_mb,
        kept_mb=server.rss_mb() - before_mb,
        left_open=left_open,
    )


def _left_open(server: EdgeServer, sockets: int) -> str:
    """Return what the server still holds after `SETTLE_S`; empty if a chat is answered and all is as before."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            requests, open_sockets = server.open_requests(), server.sockets() - sockets
            status = 0 if requests or open_sockets > 0 else server.chat()[0]
        except OSError as error:
            return f"no answer: {error!r}"
        if status == 200:
            return ""
        if time.monotonic() > deadline:
            return f"{requests} requests, {open_sockets} connections, a chat answered with {status}"
        time.sleep(0.1)


def problems(attack: Attack, outcome: Outcome) -> list[str]:
    """Return every way in which the attack succeeded."""
    found = [problem for answer in outcome.answers for problem in _answer_problems(attack, answer)]
    allowed_s = max(attack.stall_s, NOISE * outcome.quiet_s)
    if outcome.worked_s > allowed_s or outcome.stall_s > BLOCKED * allowed_s:
        found.append(f"another client waited {outcome.stall_s * 1000:.0f} ms, allowed are {allowed_s * 1000:.0f} ms")
    if outcome.grown_mb > attack.memory_mb:
        found.append(f"memory grew by {outcome.grown_mb:.0f} MB, allowed are {attack.memory_mb:.0f} MB")
    if outcome.kept_mb > KEPT_MB:
        found.append(f"{outcome.kept_mb:.0f} MB are still held")
    if outcome.left_open:
        found.append(f"left open: {outcome.left_open}")
    if attack.is_smuggled and len(outcome.answers) > 1 and outcome.answers[1].status > 0:
        found.append("a request was answered that was hidden in another")
    return list(dict.fromkeys(found))


def _answer_problems(attack: Attack, answer: Answer) -> list[str]:
    status = answer.status
    if status not in attack.statuses:
        return [f"status {status} with {answer.body[:120]!r}"]
    if status in (CUT, OPEN) or status < 400:
        return []
    if len(answer.body) > ERROR_BYTES:
        return [f"an error body of {len(answer.body)} bytes"]
    if answer.headers.get("content-type") != "application/json":
        return [f"status {status} is not JSON: {answer.headers.get('content-type')} {answer.body[:80]!r}"]
    if not isinstance(answer.json, dict) or answer.json.get("code") != status or not answer.json.get("message"):
        return [f"status {status} with {answer.body[:120]!r}"]
    return []


def attempt(attack: Attack, server: EdgeServer, tries: int = TRIES) -> tuple[Outcome, list[str]]:
    """Return the outcome and its problems. Repeat an attack whose only problem is that others waited too long."""
    outcome = carry_out(attack, server)
    found = problems(attack, outcome)
    for _ in range(tries - 1):
        if len(found) != 1 or not found[0].startswith("another client") or not server.is_running:
            break
        outcome = carry_out(attack, server)
        found = problems(attack, outcome)
    return outcome, found


def attempt_all(group: Sequence[Attack], server: EdgeServer) -> list[str]:
    """Return the problems of attacks carried out one after the other, each with the attack's name.

    If they have a problem only together, such as a stall, each is repeated alone.
    """
    answers: list[Sequence[Answer]] = []

    def act(client: Client) -> list[Answer]:
        for attack in group:
            answers.append(attack.act(client))
        return []

    together = Attack("all of them", act, memory_mb=max(attack.memory_mb for attack in group))
    if problems(together, carry_out(together, server)):
        return [f"{each.name}: {problem}" for each in group for problem in attempt(each, server)[1]]
    alone = Outcome([], quiet_s=0, stall_s=0, took_s=0, worked_s=0, grown_mb=0, kept_mb=0, left_open="")
    return [
        f"{attack.name}: {problem}"
        for attack, got in zip(group, answers, strict=True)
        for problem in problems(attack, evolve(alone, answers=got))
    ]
