"""cheapest_of_many decides as the plain look at each candidate does, to the digit and with the same draws."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from attrs import define, evolve, field
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.kv import search
from operators.kv.decision import Decision, Prompt
from operators.kv.eligibility import Candidates
from operators.kv.index import CandidateOverlap, KvIndex, Overlap
from operators.kv.load import ActiveRequest, ActiveSequences, SequenceLoad
from operators.kv.numbers import RankNumbers
from operators.kv.pace import UNOBSERVED, Pace
from operators.kv.rates import USUAL, EngineCosts, slowness
from operators.kv.search import cheapest_of_many
from operators.kv.selection import RULES, select_worker
from operators.kv.types import PlacementRule, RequestSettings, WorkerRank
from pipeline.llm import sequence_hashes
from pipeline.protocols.kv import PassRates

SIZE = 16
PROMPTS = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 10], [1, 2, 7], [20, 21, 22, 23], [1]]


@define(slots=False)
class Fleet:
    """An index and a load book that share their numbers, with random contents that change."""

    random: Random
    size: int
    dp_ranks: int = 1
    numbers: RankNumbers = field(factory=RankNumbers)
    booked: list[ActiveRequest] = field(factory=list)
    made: int = 0

    def __attrs_post_init__(self) -> None:
        self.index, self.sequences = KvIndex(numbers=self.numbers), ActiveSequences(numbers=self.numbers)
        workers = self.random.sample(range(10 * self.size), -(-self.size // self.dp_ranks))
        self.ranks = [WorkerRank(worker, rank) for worker in workers for rank in range(self.dp_ranks)][: self.size]
        self.register()

    def register(self) -> None:
        """Keep an account for each rank there is."""
        self.sequences.set_workers({rank.worker_id: range(self.dp_ranks) for rank in self.ranks})

    def step(self, now_s: float) -> None:
        """Change something: what is cached, what is in flight, or who is there."""
        kind, rank = self.random.random(), self.random.choice(self.ranks)
        local = self.random.choice(PROMPTS)[: self.random.randint(1, 6)]
        if kind < 0.25:
            self.index.store(rank, None, sequence_hashes(local), local)
        elif kind < 0.30:
            self.index.clear_rank(rank)
        elif kind < 0.33:
            self.restart(rank)
        elif kind < 0.36:
            self.sequences.note_blocks_lately(now_s, shown=self.random.random() < 0.8)
        elif kind < 0.6 or not self.booked:
            self.made += 1
            tokens = self.random.choice([0, 16, 16, 100, self.random.randrange(5000)])
            own = [10**6 * self.made + block for block in range(self.random.choice([0, 0, 30, 900]))]
            hashes, duration_s = sequence_hashes(local) + own, self.random.choice([None, None, None, 2.0])
            load = SequenceLoad(hashes, tokens, duration_s)
            self.booked.append(self.sequences.book(f"r{self.made}", rank, load, now_s))
        elif kind < 0.7:
            self.sequences.finish_prefill(self.random.choice(self.booked), now_s)
        elif kind < 0.85:
            self.sequences.grow(self.random.choice(self.booked), self.random.choice([None, 0.3]), now_s)
        else:
            self.sequences.release(self.booked.pop(self.random.randrange(len(self.booked))), now_s)

    def restart(self, rank: WorkerRank) -> None:
        """Take a worker away, and put another or the same in its place; its numbers are free in between."""
        gone = [one for one in self.ranks if one.worker_id == rank.worker_id]
        for one in gone:
            self.index.remove_rank(one)
        self.sequences.remove_worker(rank.worker_id)
        self.ranks = [one for one in self.ranks if one not in gone]
        new_id = rank.worker_id if self.random.random() < 0.5 else 10 * self.size + self.made
        self.ranks += [WorkerRank(new_id, one.dp_rank) for one in gone]
        self.made += 1
        self.register()

    def slowness(self) -> dict[WorkerRank, float]:
        """Some ranks, also of those that are gone, that are slower or faster; many of them nearly alike."""
        among, factors = [*self.ranks, WorkerRank(-1)], [2.0, 2.05, 2.3, 0.5, 0.51, 1.0, self.random.uniform(0.2, 7)]
        return {rank: self.random.choice(factors) for rank in among if self.random.random() < 0.4}

    def candidates(self) -> Candidates:
        """All ranks, or some."""
        few = self.ranks if self.random.random() < 0.7 else self.random.sample(self.ranks, (self.size + 1) // 2)
        return Candidates(tuple(sorted(few)))


def both(
    fleet: Fleet,
    local: list[int],
    config: RequestSettings,
    candidates: Candidates,
    now_s: float,
    seed: int,
    pace: Pace = UNOBSERVED,
) -> tuple[Decision, Decision | None]:
    """The decisions by each candidate and by search; both draw from generators of this seed."""
    prompt = Prompt(len(local) * SIZE + fleet.random.randrange(SIZE), SIZE)
    overlap = Overlap(device=fleet.index.find_matches(local))
    loads = fleet.sequences.field(sequence_hashes(local), candidates.ranks, now_s)
    one, other = Random(seed), Random(seed)
    plain = select_worker(prompt, candidates, overlap, loads.columns(), config, one, pace=pace)
    found = cheapest_of_many(prompt, candidates, overlap, fleet.sequences, loads, config, other, pace=pace)
    assert found is None or one.getstate() == other.getstate()
    return plain, found


def same(plain: Decision, found: Decision) -> bool:
    one, other = (
        (each.rank, each.cost, each.margin, each.attributes(), each.report(), each.cached_tokens, each.costs)
        for each in (plain, found)
    )
    return one == other


weights = st.sampled_from([0.0, 0.1, 1.0, 1 / 3, 7.5])


engines = st.builds(
    EngineCosts,
    st.floats(64, 16_384),
    st.integers(1, 20_000),
    st.floats(1e-4, 0.05),
    st.floats(24, 6000),
    st.one_of(st.none(), st.integers(1, 6)),
)
paces = st.builds(
    Pace,
    st.one_of(st.just(0.0), st.floats(0.003, 0.3)),
    st.floats(1, 5000),
    st.floats(1, 5),
    returns=st.one_of(st.just(0.0), st.floats(0, 20)),
    costs=st.one_of(st.just(USUAL), engines),
)


@settings(max_examples=400)
@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.sampled_from([1, 1, 3]),
    st.sampled_from(["cost", "expected_delay", "marginal_delay", "marginal_delay"]),
    st.sampled_from([0.0, 0.3, 1.0]),
    weights,
    weights,
    paces,
    st.booleans(),
)
def test_a_search_decides_as_a_look_at_each_candidate(
    seed: int,
    size: int,
    dp_ranks: int,
    placement: PlacementRule,
    credit: float,
    scale: float,
    weight: float,
    pace: Pace,
    differ: bool,
) -> None:
    fleet = Fleet(Random(seed), size, dp_ranks)
    config = RequestSettings(
        overlap_score_credit=credit,
        prefill_load_scale=scale,
        decode_active_request_weight=weight,
        placement=placement,
    )
    for step in range(60):
        now_s = step / 10
        fleet.step(now_s)
        local = fleet.random.choice(PROMPTS)
        own = config if fleet.random.random() < 0.8 else evolve(config, prefill_load_scale=fleet.random.random())
        if differ and not step % 10:
            pace = evolve(pace, slowness=fleet.slowness())
        plain, found = both(fleet, local, own, fleet.candidates(), now_s, seed + step, pace)
        assert found is not None or pace.slowness, "of many classes it may be no search"
        fleet.step(now_s)  # what is read later is as it was
        assert found is None or same(plain, found)


@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 0.5},
        {"track_prefill_tokens": False},
        {"overlap_score_credit_decay": 1.0},
        {"overlap_score_credit": 2.0},
        {"decode_active_request_weight": -1.0},
        {"prefill_load_scale": 1e308},
    ],
)
def test_where_the_cost_may_fall_with_the_load_each_candidate_is_looked_at(wanted: dict[str, Any]) -> None:
    fleet = Fleet(Random(1), 30)
    for step in range(100):
        fleet.step(float(step))
    _, found = both(fleet, [1, 2, 3], RequestSettings(**wanted), Candidates(tuple(sorted(fleet.ranks))), 200.0, 1)
    assert found is None


@pytest.mark.parametrize("placement", ["expected_delay", "marginal_delay"])
def test_where_half_of_the_ranks_are_slower_one_of_the_others_is_found(placement: PlacementRule) -> None:
    fleet = Fleet(Random(1), 300)
    slow = {rank: 2.0 + fleet.random.random() / 10 for rank in fleet.ranks[::2]}
    pace, config = Pace(slowness=slow, returns=3.0), RequestSettings(placement=placement)
    for step in range(20):
        plain, found = both(fleet, [1, 2], config, Candidates(tuple(sorted(fleet.ranks))), 0.0, step, pace)
        assert found is not None
        assert same(plain, found)
        assert found.rank not in slow


@given(st.integers(0, 2**32), st.integers(2, 4), paces)
def test_by_reported_rates_a_search_decides_as_a_look_at_each_candidate(seed: int, kinds: int, pace: Pace) -> None:
    """Of a few kinds of engines, as reports have it, with some ranks that do not report."""
    fleet, config = Fleet(Random(seed), 80), RequestSettings(placement="marginal_delay")
    for step in range(120):
        if not step % 40:
            each = [10**7 * 2**kind for kind in range(kinds)]
            known = {
                rank: PassRates(1000 * ps, ps)
                for rank in fleet.ranks
                if (ps := int(fleet.random.choice(each) * fleet.random.uniform(0.95, 1.05))) % 9
            }
            pace = evolve(pace, slowness=slowness(known, 700.0))
        fleet.step(step / 10)
        if step % 4:
            continue
        plain, found = both(fleet, fleet.random.choice(PROMPTS), config, fleet.candidates(), step / 10, seed, pace)
        assert found is None or same(plain, found)


@pytest.mark.parametrize("seats", [None, 1, 3])
def test_where_all_seats_are_taken_few_ranks_are_looked_at(seats: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, looked = Fleet(Random(3), 1000), list[int]()

    def counted(prompt: Prompt, overlap: CandidateOverlap, *others: Any) -> list[float]:
        looked.append(len(overlap.device))
        return RULES["marginal_delay"](prompt, overlap, *others)

    monkeypatch.setattr(search, "RULES", {"marginal_delay": counted})
    for step in range(5000):
        load = SequenceLoad([step], fleet.random.randrange(500))
        fleet.sequences.book(f"r{step}", fleet.random.choice(fleet.ranks), load, 0.0)
    known = {rank: PassRates(10**10 * (1 + rank.worker_id % 2), 10**7) for rank in fleet.ranks}
    pace = Pace(slowness=slowness(known, 1000.0), costs=EngineCosts(seats=seats))
    by, candidates = RequestSettings(placement="marginal_delay"), Candidates(tuple(sorted(fleet.ranks)))
    plain, found = both(fleet, [1, 2, 3], by, candidates, 30.0, 1, pace)
    assert found is not None
    assert same(plain, found)
    assert sum(looked) < 40


def test_a_slowness_of_a_rank_goes_with_it() -> None:
    fleet = Fleet(Random(1), 30)
    pace, config = Pace(slowness={fleet.ranks[-1]: 9.0}), RequestSettings(placement="marginal_delay")
    gone = fleet.ranks[-1]
    for _ in range(5):
        fleet.restart(fleet.ranks[-1])
        plain, found = both(fleet, [1], config, Candidates(tuple(sorted(fleet.ranks[-1:]))), 0.0, 1, pace)
        assert found is not None
        assert same(plain, found)
        assert (found.rank == gone) == (found.cost > 5000)


def test_without_candidates_there_is_nothing_to_search() -> None:
    fleet = Fleet(Random(1), 3)
    loads = fleet.sequences.field([], (), 0.0)
    prompt, none = Prompt(16, SIZE), Candidates(())
    assert cheapest_of_many(prompt, none, Overlap(), fleet.sequences, loads, RequestSettings(), Random(1)) is None


def test_what_was_found_before_a_number_went_to_another_rank_is_not_searched() -> None:
    fleet = Fleet(Random(1), 3)
    fleet.index.store(fleet.ranks[0], None, [1], [1])
    overlap, gone = Overlap(device=fleet.index.find_matches([1])), fleet.ranks[0]
    fleet.restart(gone)
    candidates = Candidates(tuple(sorted(fleet.ranks)))
    loads = fleet.sequences.field([], candidates.ranks, 0.0)
    prompt, config = Prompt(16, SIZE), RequestSettings()
    if gone not in fleet.ranks:
        assert cheapest_of_many(prompt, candidates, overlap, fleet.sequences, loads, config, Random(1)) is None
    assert dict(overlap.device) == {gone: 1}


@pytest.mark.parametrize("placement", ["cost", "expected_delay", "marginal_delay"])
def test_of_a_thousand_busy_ranks_few_are_looked_at(monkeypatch: pytest.MonkeyPatch, placement: PlacementRule) -> None:
    fleet, looked = Fleet(Random(3), 1000), list[int]()

    def counted(prompt: Prompt, overlap: CandidateOverlap, *others: Any) -> list[float]:
        looked.append(len(overlap.device))
        return RULES[placement](prompt, overlap, *others)

    monkeypatch.setattr(search, "RULES", {placement: counted})
    for step in range(3000):
        fleet.made += 1
        load = SequenceLoad([fleet.made], fleet.random.randrange(5000))
        fleet.sequences.book(f"r{step}", fleet.random.choice(fleet.ranks), load, 0.0)
    for rank in fleet.ranks:
        fleet.index.store(rank, None, [1, 2], [1, 2])
    fleet.index.store(fleet.ranks[0], 2, [3], [3])
    candidates = Candidates(tuple(sorted(fleet.ranks)))
    fleet.sequences.note_blocks_lately(30.0, shown=placement == "marginal_delay")
    by, pace = RequestSettings(placement=placement), Pace(returns=5.0)
    plain, found = both(fleet, [1, 2, 3], by, candidates, 30.0, 1, pace)
    assert found is not None
    assert sum(looked) < 20
    assert same(plain, found)
    assert len(fleet.sequences.holders().masks) > 900, "or the walk has nothing to pass over"


def test_a_search_takes_no_more_steps_than_there_are_candidates() -> None:
    """Those who have the prompt are the busiest: the lightest of them comes after all others."""
    fleet = Fleet(Random(3), 300)
    for number, rank in enumerate(fleet.ranks):
        fleet.sequences.book(f"r{number}", rank, SequenceLoad([number], 100 * number), 0.0)
    for rank in fleet.ranks[-40:]:
        fleet.index.store(rank, None, [1], [1])
    candidates = Candidates(tuple(sorted(fleet.ranks)))
    _, found = both(fleet, [1], RequestSettings(), candidates, 1.0, 1)
    assert found is None
    plain, found = both(fleet, [2], RequestSettings(), candidates, 1.0, 1)
    assert found is not None
    assert same(plain, found)
