"""The index against the plainest thing that could answer: the set of each rank's blocks, each as its whole path."""

from __future__ import annotations

from random import Random

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import KvIndex, WorkerRank
from operators.kv.index import BlockNotFound, InvalidBlockSequence, KvIndexError, ParentBlockNotFound
from pipeline.protocols.kv import KvCleared, KvEvent, KvEventData, KvRemoved, KvStored, RouterEvent, StoredBlock

RANKS = [WorkerRank(1, 0), WorkerRank(1, 1), WorkerRank(2, 0), WorkerRank(9, 3)]
LOCALS = [11, 12, 13]
Path = tuple[int, ...]


@define
class RankModel:
    """Name -> path of each block held; a rank that holds a path holds its beginnings."""

    paths: dict[int, Path] = field(factory=dict)

    def store(self, change: KvStored) -> str:
        if not change.blocks:
            return "ok"
        names = [block.block_hash for block in change.blocks]
        if change.parent_hash is not None and change.parent_hash not in self.paths:
            return ParentBlockNotFound.__name__
        if len(set(names)) < len(names) or change.parent_hash in names:
            return InvalidBlockSequence.__name__
        base = self.paths[change.parent_hash] if change.parent_hash is not None else ()
        whole = [*base, *(block.tokens_hash for block in change.blocks)]
        wanted = {name: tuple(whole[: len(base) + i + 1]) for i, name in enumerate(names)}
        known = next((i for i, name in enumerate(names) if self.paths.get(name) != wanted[name]), len(names))
        if known == len(names):
            return "duplicate_store"
        moved = [self.paths[name] for name in names[known:] if name in self.paths]
        place = tuple(whole[: len(base) + known])
        if any(place[: len(path)] == path for path in moved):
            return InvalidBlockSequence.__name__
        for path in moved:
            self.drop(path)
        taken = {path: name for name, path in self.paths.items()}
        for name in names[known:]:
            self.paths.pop(taken.get(wanted[name], -1), None)
            self.paths[name] = wanted[name]
        return "ok"

    def remove(self, names: list[int]) -> str:
        found = [name for name in dict.fromkeys(names) if name in self.paths]
        for path in [self.paths[name] for name in found]:
            self.drop(path)
        return "ok" if len(found) == len(names) else BlockNotFound.__name__

    def drop(self, path: Path) -> None:
        self.paths = {name: other for name, other in self.paths.items() if other[: len(path)] != path}

    def score(self, query: list[int]) -> int:
        held = set(self.paths.values())
        return next((i for i in range(len(query)) if tuple(query[: i + 1]) not in held), len(query))


@define
class Script:
    """Random events: names by a common rule, by a rule of the rank's own, or any; parents and removals of all kinds."""

    random: Random
    models: dict[WorkerRank, RankModel] = field(factory=dict)

    def event(self) -> tuple[WorkerRank, KvEventData]:
        rank = self.random.choice(RANKS)
        model = self.models.setdefault(rank, RankModel())
        kind = self.random.random()
        if kind < 0.04:
            return rank, KvCleared()
        if kind < 0.30 and model.paths:
            return rank, KvRemoved(self._removed(model))
        return rank, self._stored(rank, model)

    def _removed(self, model: RankModel) -> list[int]:
        order = sorted(model.paths, key=lambda name: (len(model.paths[name]), name), reverse=self.random.random() < 0.7)
        chosen = self.random.sample(order, min(len(order), self.random.randint(1, 3)))
        if self.random.random() < 0.5:
            chosen = order[: self.random.randint(1, 4)]
        return chosen + ([self.random.randint(1, 12)] if self.random.random() < 0.1 else [])

    def _stored(self, rank: WorkerRank, model: RankModel) -> KvStored:
        parent = self.random.choice([None, *model.paths]) if self.random.random() < 0.9 else self.random.randint(1, 12)
        path = list(model.paths.get(parent, ())) if parent is not None else []
        blocks = []
        for _ in range(self.random.randint(0, 5)):
            path.append(self.random.choice(LOCALS))
            blocks.append(StoredBlock(self._name(rank, tuple(path)), path[-1]))
        return KvStored(parent, blocks)

    def _name(self, rank: WorkerRank, path: Path) -> int:
        kind = self.random.random()
        if kind < 0.08:
            return self.random.randint(1, 12)
        return hash((path, rank if rank.worker_id == 9 or kind < 0.1 else 0)) % 2**64

    def apply(self, rank: WorkerRank, change: KvEventData) -> str:
        """What the model answers to the change."""
        model = self.models[rank]
        if isinstance(change, KvStored):
            return model.store(change)
        if isinstance(change, KvRemoved):
            return model.remove(change.block_hashes)
        model.paths = {}
        return "ok"

    def scores(self, query: list[int]) -> dict[WorkerRank, int]:
        scores = {rank: model.score(query) for rank, model in self.models.items()}
        return {rank: score for rank, score in scores.items() if score}


def outcome(index: KvIndex, rank: WorkerRank, change: KvEventData) -> str:
    try:
        return index.apply(RouterEvent(rank.worker_id, KvEvent(1, change, rank.dp_rank)))
    except KvIndexError as error:
        return type(error).__name__


def rows(events: list[RouterEvent]) -> set[tuple[int, int, int | None, int, int]]:
    """(worker, rank, parent, name, local) of every block in the stores."""
    found = set()
    for event in events:
        change = event.event.data
        assert isinstance(change, KvStored)
        parent = change.parent_hash
        for block in change.blocks:
            found.add((event.worker_id, event.event.dp_rank, parent, block.block_hash, block.tokens_hash))
            parent = block.block_hash
    return found


@given(st.integers(0, 2**32))
def test_the_index_answers_as_sets_of_paths_would(seed: int) -> None:
    script, index = Script(Random(seed)), KvIndex()
    for _ in range(40):
        rank, change = script.event()
        assert outcome(index, rank, change) == script.apply(rank, change)
        if script.random.random() < 0.03:
            index.remove_worker(1)
            script.models = {rank: model for rank, model in script.models.items() if rank.worker_id != 1}
        query = script.random.choices(LOCALS, k=script.random.randint(0, 8))
        assert index.find_matches(query) == script.scores(query)
    for rank, model in script.models.items():
        assert index.held_blocks(rank) == len(model.paths)
        for path in model.paths.values():
            assert index.find_matches(path) == script.scores(list(path))
    assert index.block_count() == len({path for model in script.models.values() for path in model.paths.values()})


@given(st.integers(0, 2**32))
def test_a_dump_restores_the_same_blocks_names_and_dump(seed: int) -> None:
    script, index = Script(Random(seed)), KvIndex()
    for _ in range(30):
        rank, change = script.event()
        outcome(index, rank, change)
        script.apply(rank, change)
    dumped = index.dump()
    assert [event.event.event_id for event in dumped] == list(range(len(dumped)))
    names = {path: name for name, path in script.models[RANKS[0]].paths.items()} if RANKS[0] in script.models else {}
    of_first = {row[2:] for row in rows(dumped) if row[:2] == RANKS[0]}
    assert of_first == {(names.get(path[:-1]), name, path[-1]) for path, name in names.items()}
    restored = KvIndex()
    for event in dumped:
        restored.apply(event)
    assert restored.dump() == dumped


@given(st.integers(0, 2**32))
def test_nothing_is_left_of_ranks_that_are_gone(seed: int) -> None:
    script, index = Script(Random(seed)), KvIndex()
    for _ in range(30):
        rank, change = script.event()
        outcome(index, rank, change)
        script.apply(rank, change)
    for rank in index.ranks():
        index.remove_rank(rank)
    assert index.ranks() == []
    assert index.block_count() == 0
    assert index._root.branches == {}
    assert index._root.ends == {}
