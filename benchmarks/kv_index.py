"""Hashing, storing, finding and removing blocks, beside the Rust index of another router called from Python.

    python -m benchmarks.kv_index               measures and prints
    pip install ai-dynamo-runtime==1.4.2        the peer; without it the figures stand alone
    PENSTOCK_TRACE=trace.jsonl                  requests with `hash_ids` of 512 tokens; else conversations are made up

Both hold the same blocks and answer the same questions, turn by turn in one run. A store takes an event as the index
does, a record here and JSON there; a question takes hashes as the hash function gives them, an array here and a list
there. Times are CPU time of the process, threads of the peer included: on a shared machine a hand-over between threads
waits for longer than the work takes. Memory is the growth of a fresh process.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from attrs import define, frozen

from operators.kv import KvIndex, WorkerRank
from pipeline.llm import block_hash_array, block_hashes, sequence_hashes
from pipeline.protocols.kv import KvEvent, KvRemoved, KvStored, RouterEvent, StoredBlock

from .measure import Result

BLOCK_TOKENS, TRACE_BLOCK_TOKENS = 16, 512
WORKERS = (8, 64, 512)
REQUESTS = 600
QUERIES = 150
REPEATS = 7
REMOVED_TOGETHER = 16
"""Blocks that an event removes."""

Scores = dict[Any, int]


@frozen
class Stored:
    """A store as (parent, [(sequence hash, local hash)]) of a worker."""

    worker_id: int
    event_id: int
    parent: int | None
    blocks: list[tuple[int, int]]

    def as_event(self) -> RouterEvent:
        change = KvStored(self.parent, [StoredBlock(name, local) for name, local in self.blocks])
        return RouterEvent(self.worker_id, KvEvent(self.event_id, change))

    def as_json(self) -> bytes:
        blocks = [{"block_hash": name, "tokens_hash": local} for name, local in self.blocks]
        stored = {"parent_hash": self.parent, "blocks": blocks}
        return json.dumps({"event_id": self.event_id, "data": {"stored": stored}, "dp_rank": 0}).encode()


def requests() -> list[list[int]]:
    """The ids of each request's blocks of `TRACE_BLOCK_TOKENS`; equal ids are equal tokens."""
    path = os.environ.get("PENSTOCK_TRACE")
    return _of_trace(Path(path)) if path else list(_conversations(Random(7)))


def prompts() -> list[list[int]]:
    """The local hashes of each request's blocks."""
    ids = requests()
    wide = TRACE_BLOCK_TOKENS // BLOCK_TOKENS
    made = {i: block_hashes(range(i * wide, (i + 1) * wide), 1) for request in ids for i in request}
    return [[local for i in request for local in made[i]] for request in ids]


def _of_trace(path: Path) -> list[list[int]]:
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(REQUESTS), strict=False)]


def _conversations(random: Random) -> Iterator[list[int]]:
    """Turns of conversations that begin alike; each goes on from the one before it."""
    fresh, open_ones = iter(range(1, 10**9)), [[0]]
    for _ in range(REQUESTS):
        start = random.choice(open_ones) if random.random() < 0.4 else [0]
        turn = [*start, *(next(fresh) for _ in range(random.randint(4, 40)))]
        open_ones = [*open_ones[-50:], turn]
        yield turn


def stores(given: list[list[int]], workers: int) -> Iterator[Stored]:
    """Yield what workers store: the blocks of each request that its worker, the next in turn, does not hold yet."""
    held: list[set[int]] = [set() for _ in range(workers)]
    for number, local in enumerate(given):
        worker, chained = number % workers, sequence_hashes(local)
        known = next((i for i, name in enumerate(chained) if name not in held[worker]), len(chained))
        held[worker].update(chained)
        if known < len(chained):
            parent = chained[known - 1] if known else None
            yield Stored(worker, number + 1, parent, list(zip(chained[known:], local[known:], strict=True)))


# -- the two under test


@define
class Subject:
    """An index under test."""

    store: Callable[[Stored], float]
    """Applies one and gives the seconds it took, its encoding not counted."""
    query: Callable[[array[int]], Any]
    """Hashes as `find` takes them."""
    find: Callable[[Any], Scores]
    remove: Callable[[int, list[list[int]]], float]
    """Applies removals of a worker, a list of blocks each, and gives the seconds as for a store."""
    masks: Callable[[Any], object] | None = None
    """Finds, as the router reads it: groups of ranks, none written out."""


def ours() -> Subject:
    index = KvIndex()

    def store(stored: Stored) -> float:
        event = stored.as_event()
        start = process_time()
        index.apply(event)
        return process_time() - start

    def remove(worker_id: int, removals: list[list[int]]) -> float:
        events = [RouterEvent(worker_id, KvEvent(i, KvRemoved(names))) for i, names in enumerate(removals)]
        start = process_time()
        for event in events:
            index.apply(event)
        return process_time() - start

    def find(local: array[int]) -> Scores:
        return index.find_matches(local).by_rank()

    return Subject(store, lambda local: local[:], find, remove, index.find_matches)


def peer_library() -> Any:
    """The peer's module, None where it is not installed."""
    try:
        return import_module("dynamo._core")
    except ImportError:
        return None


def peer() -> Subject:
    tree = peer_library().RadixTree()

    def store(stored: Stored) -> float:
        event = stored.as_json()
        start = process_time()
        tree.apply_event(stored.worker_id, event)
        return process_time() - start

    def remove(worker_id: int, removals: list[list[int]]) -> float:
        events = [{"event_id": i, "data": {"removed": {"block_hashes": names}}} for i, names in enumerate(removals)]
        texts = [json.dumps({**event, "dp_rank": 0}).encode() for event in events]
        start = process_time()
        for text in texts:
            tree.apply_event(worker_id, text)
        return process_time() - start

    def find(local: list[int]) -> Scores:
        return dict(tree.find_matches(local).scores)

    return Subject(store, lambda local: local.tolist(), find, remove)


def subjects() -> list[Subject]:
    return [ours()] if peer_library() is None else [ours(), peer()]


# -- measuring


def _hashing(block_tokens: int) -> Result:
    tokens = [Random(1).randrange(128_000) for _ in range(8192)]
    library = peer_library()
    runs: list[Callable[[], Any]] = [lambda: block_hash_array(tokens, block_tokens)]
    if library is not None:
        runs.append(lambda: library.compute_block_hash_for_seq(tokens, block_tokens))
        assert runs[0]().tolist() == runs[1]()
    best = _alternating(runs, repeats=200)
    return Result(f"hash 8,192 tokens, blocks of {block_tokens}", best[0] * 1e6, "µs", _second(best, 1e6), "≤ 1 peer")


def _alternating(runs: list[Callable[[], Any]], repeats: int) -> list[float]:
    """The fastest of some turns of each, in seconds."""
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for i, run in enumerate(runs):
            start = process_time()
            run()
            best[i] = min(best[i], process_time() - start)
    return best


def _second(values: list[float], factor: float) -> float | None:
    return values[1] * factor if len(values) > 1 else None


def _index(given: list[list[int]], workers: int) -> list[Result]:
    everything = list(stores(given, workers))
    count = sum(len(stored.blocks) for stored in everything)
    seconds: list[list[float]] = []
    under_test: list[Subject] = []
    for _ in range(3):
        under_test = subjects()
        gc.collect()
        took = [0.0] * len(under_test)
        for stored in everything:
            for i, subject in enumerate(under_test):
                took[i] += subject.store(stored)
        seconds.append(took)
    sample = [array("Q", local) for local in given[:: max(1, len(given) // QUERIES)]]
    _same_answers(under_test, sample)
    passes = [_one_pass(under_test, sample) for _ in range(REPEATS)]
    per_store = [min(column) / count for column in zip(*seconds, strict=True)]
    per_find = [min(column) for column in zip(*passes, strict=True)]
    finds: list[tuple[Callable[[array[int]], Any], Callable[[Any], object]]] = []
    finds += [(subject.query, subject.find) for subject in under_test]
    finds += [(subject.query, subject.masks) for subject in under_test if subject.masks is not None]
    warm = _alternating([partial(_find_all, query, find, sample) for query, find in finds], REPEATS)
    per_warm = [seconds / len(sample) for seconds in warm]
    as_masks = per_warm.pop()
    per_remove = [seconds / count for seconds in _removed(under_test, everything)]
    return [
        Result(f"store a block, {workers} workers", per_store[0] * 1e9, "ns", _second(per_store, 1e9), "≤ 1/2 peer"),
        Result(f"find a prompt, {workers} workers", per_find[0] * 1e6, "µs", _second(per_find, 1e6), "≤ 1/4 peer"),
        Result(f"the same, found just before, {workers} workers", per_warm[0] * 1e6, "µs", _second(per_warm, 1e6)),
        Result(f"the same as groups of ranks, {workers} workers", as_masks * 1e6, "µs"),
        Result(f"remove a block, {workers} workers", per_remove[0] * 1e9, "ns", _second(per_remove, 1e9), "≤ 1 peer"),
    ]


def _find_all(query: Callable[[array[int]], Any], find: Callable[[Any], object], sample: list[array[int]]) -> None:
    """Find each prompt of the sample; encoding it takes next to nothing."""
    for local in sample:
        find(query(local))


def _removed(under_test: list[Subject], everything: list[Stored]) -> list[float]:
    """Return the seconds in which each removes all blocks: the last of each worker first, by turns."""
    held: dict[int, dict[int, None]] = {}
    for stored in everything:
        held.setdefault(stored.worker_id, {}).update((name, None) for name, _ in stored.blocks)
    took = [0.0] * len(under_test)
    for worker_id, blocks in held.items():
        names = list(blocks)[::-1]
        removals = [names[at : at + REMOVED_TOGETHER] for at in range(0, len(names), REMOVED_TOGETHER)]
        for i, subject in enumerate(under_test):
            took[i] += subject.remove(worker_id, removals)
    return took


def _one_pass(under_test: list[Subject], sample: list[array[int]]) -> list[float]:
    """Return the mean seconds of a query. Each is made once, with fresh hashes, so the index is as cold as in use."""
    took = [0.0] * len(under_test)
    for query in sample:
        for i, subject in enumerate(under_test):
            local = subject.query(query)
            start = process_time()
            subject.find(local)
            took[i] += process_time() - start
    return [seconds / len(sample) for seconds in took]


def _same_answers(under_test: list[Subject], sample: list[array[int]]) -> None:
    for query in sample:
        answers = [{WorkerRank(*rank): depth for rank, depth in s.find(s.query(query)).items()} for s in under_test]
        assert all(answer == answers[0] for answer in answers)


def _memory(given: list[list[int]], workers: int) -> Result:
    names = ["ours", "peer"][: len(subjects())]
    everything = list(stores(given, workers))
    count = sum(len(stored.blocks) for stored in everything)
    text = b"\n".join(b"%d %s" % (stored.worker_id, stored.as_json()) for stored in everything)
    grown = [_grown_bytes(name, text) / count for name in names]
    return Result(f"memory of a block stored, {workers} workers", grown[0], "B", _second(grown, 1.0), "≤ 1 peer")


def _grown_bytes(name: str, text: bytes) -> int:
    command = [sys.executable, "-m", "benchmarks.kv_index", name]
    return int(subprocess.run(command, input=text, capture_output=True, check=True).stdout)


def _grow(name: str) -> int:
    """By how many resident bytes the stores on standard input make this process grow."""
    subject = ours() if name == "ours" else peer()
    gc.collect()
    before = _resident_bytes()
    for line in sys.stdin.buffer:
        owner, event = line.split(b" ", 1)
        plain = json.loads(event)
        change = plain["data"]["stored"]
        blocks = [(block["block_hash"], block["tokens_hash"]) for block in change["blocks"]]
        subject.store(Stored(int(owner), plain["event_id"], change["parent_hash"], blocks))
    gc.collect()
    return _resident_bytes() - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure() -> list[Result]:
    if peer_library() is None:
        print("ai-dynamo-runtime is not installed: the KV index is measured alone")
    given = prompts()
    results = [_hashing(16), _hashing(64)]
    for workers in WORKERS:
        results += [*_index(given, workers), _memory(given, workers)]
    return results


def show(results: list[Result]) -> None:
    """Prints them with how many times the peer takes what we take."""
    for result in results:
        peer_value = (
            "" if result.floor is None else f"{result.floor:10.1f} {result.unit:2} {1 / (result.ratio or 1):6.2f}"
        )
        print(f"{result.name:46} {result.value:10.1f} {result.unit:2} {peer_value}  {result.budget}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(_grow(sys.argv[1]))
    else:
        show(asyncio.run(measure()))
