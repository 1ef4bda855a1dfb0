"""Pickers: which worker gets a request, given what is in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators import DeviceAware, RoundRobin, least_loaded, power_of_two
from operators import random_pick as draw
from operators.pool import DEVICE_RATIO, Picker
from operators.pool.load import DeviceType, WorkerLoad
from operators.pool.pickers import Uncounted
from pipeline import Context, InvalidArgument

REQUEST: Context[Any] = Context(None)


def loads(in_flight: Mapping[int, int], devices: Mapping[int, DeviceType] | None = None) -> dict[int, WorkerLoad]:
    return {i: WorkerLoad(count, (devices or {}).get(i)) for i, count in in_flight.items()}


def picks(picker: Picker, counts: Mapping[int, int], ids: Sequence[int] | None = None, times: int = 60) -> set[int]:
    """All that the picker takes, whatever the chance."""
    return {picker(ids or sorted(counts), loads(counts), REQUEST, Random(seed)) for seed in range(times)}


class Counted(Mapping[int, WorkerLoad]):
    """Loads that count how often they are looked at."""

    def __init__(self, known: Mapping[int, WorkerLoad]) -> None:
        self._known = known
        self.reads = 0

    def __getitem__(self, instance_id: int) -> WorkerLoad:
        self.reads += 1
        return self._known[instance_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class CountingRandom(Random):
    """Counts its draws of a number below a bound."""

    draws = 0

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        self.draws += 1
        return super().randrange(start, stop, step)


def test_round_robin_peeks_without_moving() -> None:
    picker, ids = RoundRobin(), [10, 20, 30, 40]
    assert {picker.peek(ids, {}, REQUEST, Random()) for _ in range(16)} == {10}
    assert [picker(ids, {}, REQUEST, Random()) for _ in range(5)] == [10, 20, 30, 40, 10]


def test_round_robin_goes_on_where_it_was_when_the_pool_changes() -> None:
    picker = RoundRobin()
    ids = [[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3]]
    assert [picker(candidates, {}, REQUEST, Random()) for candidates in ids] == [1, 2, 1, 1]


def test_a_random_pick_repeats_with_its_seed_and_reaches_all() -> None:
    drawn = [[draw([1, 2, 3], {}, REQUEST, Random(seed)) for seed in range(50)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {1, 2, 3}


def test_of_two_the_one_with_less_in_flight_is_taken() -> None:
    """Where nothing is known nothing is in flight, and one alone is taken as it is."""
    assert picks(power_of_two, {1: 10, 2: 1}) == {2}
    assert picks(power_of_two, {1: 10}, [1, 2]) == {2}
    assert picks(power_of_two, {1: 10}) == {1}


def test_of_two_that_are_equal_the_first_drawn_is_taken() -> None:
    taken = Counter(power_of_two([1, 2], loads({1: 3, 2: 3}), REQUEST, Random(seed)) for seed in range(200))
    assert min(taken[1], taken[2]) > 50
    for seed in range(20):
        first = Random(seed).randrange(2)
        assert power_of_two([1, 2], loads({1: 3, 2: 3}), REQUEST, Random(seed)) == [1, 2][first]


@pytest.mark.parametrize("count", [2, 4, 100])
def test_two_are_drawn_and_two_loads_are_read_however_many_there_are(count: int) -> None:
    rng, known = CountingRandom(1), Counted(loads(dict.fromkeys(range(count), 0)))
    power_of_two(list(range(count)), known, REQUEST, rng)
    assert (rng.draws, known.reads) == (2, 2)


def test_the_two_that_are_drawn_are_never_the_same() -> None:
    """The one with most in flight is taken only against itself."""
    assert picks(power_of_two, {1: 0, 2: 0, 3: 9}, times=300) == {1, 2}


def test_the_least_loaded_is_taken() -> None:
    assert picks(least_loaded, {1: 2, 2: 1, 3: 0}) == {3}
    assert picks(least_loaded, {1: 2, 2: 1, 3: 0}, [1, 2]) == {2}


def test_among_the_least_loaded_each_is_as_likely() -> None:
    taken = Counter(least_loaded([1, 2, 3], loads({1: 1, 2: 1, 3: 5}), REQUEST, Random(seed)) for seed in range(200))
    assert taken.keys() == {1, 2}
    assert min(taken.values()) > 70


DEVICES: dict[int, DeviceType] = {1: "cpu", 2: "cpu", 3: "cuda", 4: "cuda"}


@pytest.mark.parametrize(
    ("in_flight", "group"),
    [
        ({1: 0, 2: 0, 3: 0, 4: 0}, {3, 4}),  # all idle: accelerators
        ({1: 0, 2: 0, 3: 4, 4: 3}, {4}),  # the share of the CPUs is 7 * 2 // (8 * 2) = 0
        ({1: 0, 2: 0, 3: 4, 4: 4}, {1, 2}),  # now it is 1, and they have 0
        ({1: 1, 2: 0, 3: 4, 4: 4}, {3, 4}),
        ({1: 1, 2: 0, 3: 8, 4: 8}, {2}),
    ],
)
def test_cpus_are_filled_up_to_their_share(in_flight: dict[int, int], group: set[int]) -> None:
    known = loads(in_flight, DEVICES)
    assert {DeviceAware()([1, 2, 3, 4], known, REQUEST, Random(seed)) for seed in range(40)} == group


@given(st.lists(st.integers(0, 40), min_size=4, max_size=4), st.integers(1, 12))
def test_the_group_is_that_of_the_rule(counts: list[int], ratio: int) -> None:
    known = loads(dict(zip([1, 2, 3, 4], counts, strict=True)), DEVICES)
    chosen = DeviceAware(ratio)([1, 2, 3, 4], known, REQUEST, Random(1))
    wants_cpu = sum(counts[:2]) < int(sum(counts[2:]) * 2 / (ratio * 2))
    group = [1, 2] if wants_cpu else [3, 4]
    assert chosen in group
    assert known[chosen].in_flight == min(known[i].in_flight for i in group)


def test_an_instance_without_a_device_is_an_accelerator() -> None:
    known = loads({1: 0, 2: 0}, {1: "cpu"})
    assert DeviceAware()([1, 2], known, REQUEST, Random(1)) == 2


@pytest.mark.parametrize("device", ["cpu", "cuda", None])
def test_with_one_class_of_devices_the_least_loaded_is_taken(device: DeviceType | None) -> None:
    known = {1: WorkerLoad(3, device), 2: WorkerLoad(1, device)}
    assert DeviceAware()([1, 2], known, REQUEST, Random(1)) == 2


def test_an_instance_that_holds_all_media_is_taken_and_not_charged() -> None:
    held = {1: ["cat"], 3: ["cat"]}
    picker = DeviceAware(holds_media=lambda instance_id, request: request.payload in held.get(instance_id, []))
    known = loads({1: 9, 2: 0, 3: 8, 4: 0}, DEVICES)
    chosen = picker([1, 2, 3, 4], known, Context("cat"), Random(1))
    assert (chosen, type(chosen)) == (3, Uncounted)
    other = picker([1, 2, 3, 4], known, Context("dog"), Random(1))
    assert (other, type(other)) == (4, int)


def test_a_ratio_below_one_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        DeviceAware(0)
    assert caught.value.field == "cuda_to_cpu_ratio"


@pytest.mark.parametrize(("text", "ratio"), [(None, 8), ("", 8), ("four", 8), ("-3", 8), (" 4 ", 4), ("0", 1)])
def test_the_environment_may_set_the_ratio(text: str | None, ratio: int) -> None:
    assert DEVICE_RATIO.of({} if text is None else {"DYN_ENCODER_CUDA_TO_CPU_RATIO": text}) == ratio
