"""Every attack fails: a clear answer or a cut connection, no stall of others, bounded memory, nothing left open.

Real servers, real sockets. How long others wait can be measured only while nothing else runs, so those tests are slow.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from tests.edge.all_attacks import Servers, attacks
from tests.edge.attack import Attack, Outcome, attempt, attempt_all, problems
from tests.edge.bodies import post, raw_chat
from tests.edge.wire import CUT, Answer, Client

ATTACKS = attacks()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("model"))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("attack", [pytest.param(each, id=each.name) for each in ATTACKS if not each.group])
def test_an_attack_stalls_no_other_client_and_leaves_nothing_behind(servers: Servers, attack: Attack) -> None:
    outcome, found = attempt(attack, servers.of(attack))
    assert found == [], outcome.statuses


@pytest.mark.slow
@pytest.mark.parametrize("group", sorted({each.group for each in ATTACKS if each.group}))
def test_attacks_that_are_over_at_once_leave_nothing_behind(servers: Servers, group: str) -> None:
    attacks_of_group = [each for each in ATTACKS if each.group == group]
    assert attempt_all(attacks_of_group, servers.of(attacks_of_group[0])) == []


def test_there_are_at_least_thirty_attacks_beside_those_of_the_issue() -> None:
    names = [each.name for each in ATTACKS]
    assert len(set(names)) == len(names)
    assert sum(not each.is_slow and "small" not in each.name for each in ATTACKS) >= 30


OUTCOME = Outcome([], quiet_s=0.001, stall_s=0.002, took_s=1, worked_s=0.002, grown_mb=1, kept_mb=0, left_open="")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"stall_s": 0.06, "worked_s": 0.055}, "another client waited 60 ms"),
        ({"stall_s": 0.3, "worked_s": 0}, "another client waited 300 ms"),
        ({"grown_mb": 500}, "memory grew by 500 MB"),
        ({"kept_mb": 500}, "500 MB are still held"),
        ({"left_open": "1 requests"}, "left open: 1 requests"),
        ({"answers": [Answer(200)]}, "status 200"),
        ({"answers": [Answer(CUT)]}, "status 0"),
        ({"answers": [Answer(400, {}, b"Bad")]}, "status 400 is not JSON"),
        ({"answers": [Answer(400, {"content-type": "application/json"}, b'{"code":413,"message":"x"}')]}, "status 400"),
        ({"answers": [Answer(400, {"content-type": "application/json"}, b"x" * 5000)]}, "an error body of 5000 bytes"),
    ],
)
def test_each_way_to_succeed_is_noticed(changed: dict[str, Any], problem: str) -> None:
    attack = Attack("x", lambda client: [])
    assert problems(attack, OUTCOME) == []
    (found,) = problems(attack, attrs.evolve(OUTCOME, **changed))
    assert found.startswith(problem)


def test_a_wait_in_which_the_server_did_not_work_is_the_machines() -> None:
    attack = Attack("x", lambda client: [])
    assert problems(attack, attrs.evolve(OUTCOME, stall_s=0.06, worked_s=0.01)) == []
    assert problems(attack, attrs.evolve(OUTCOME, stall_s=0.06, worked_s=0.06, quiet_s=0.03)) == []


@pytest.mark.slow
def test_a_stall_leak_and_growth_are_seen_from_outside(servers: Servers) -> None:
    """The probes against a server that is stopped for a while, and a request that is under way."""
    server = servers.of(Attack("x", lambda client: []))
    stopped_s = 2.0  # longer than what a busy machine excuses

    def stop_it(client: Client) -> list[Answer]:
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(server.process.pid, signal.SIGCONT)
        return []

    outcome, found = attempt(Attack("a stopped server", stop_it), server, tries=1)
    assert stopped_s - 0.1 < outcome.stall_s < 10
    assert len(found) == 1
    outcome, found = attempt(Attack("an ordinary chat", post(raw_chat), {200}), server)
    assert found == []
    assert 0 < outcome.worked_s <= outcome.stall_s
