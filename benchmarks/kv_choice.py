"""From a prompt's tokens to its worker, with no request in flight, beside the same by another router.

    python -m benchmarks.kv_choice

    parts     its hash function, its tree, the rank with the deepest match; ours the same, KvIndex for the tree
    router    its whole KvRouter, on its own threads: cached prefixes, load, cost, the choice; ours is KvRouter.advise

Settings and peer are those of `kv_index`. All hold the same: each request is recorded where the other router puts it.
The other router is called from Python. Its workers are entries of its file discovery, copied from one real one: no
request is sent, so no worker needs to run. Each number of workers is a process of its own, because a process has one
runtime of the other library.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from operators.kv import KvIndex, KvRouter, KvRouterConfig, PromptBlocks, RouteRequest, WorkerRank, kv_router
from pipeline.network import static_workers
from pipeline.testing import ScriptedEngine

from .kv_index import BLOCK_TOKENS, QUERIES, REPEATS, TRACE_BLOCK_TOKENS, WORKERS, Stored, peer_library, requests, show
from .measure import Result

FOREVER_S = 1e6
SPREAD = {"router_temperature": 5.0}
"""With it the other router spreads the requests over its workers, whatever is cached where."""

Query = Callable[[list[int]], Awaitable[Any]]


def prompts() -> list[list[int]]:
    """The tokens of each request."""
    wide = TRACE_BLOCK_TOKENS
    return [[token for i in request for token in range(i * wide, (i + 1) * wide)] for request in requests()]


def _ours(workers: list[int]) -> KvRouter:
    config = KvRouterConfig(use_kv_events=False, router_ttl_secs=FOREVER_S, router_max_tree_size=2**30)
    pool = static_workers({worker_id: ScriptedEngine([]) for worker_id in workers})
    return kv_router(pool, config, block_size_tokens=BLOCK_TOKENS, rng=Random(1))


# -- the other router


async def _no_answer(request: Any, context: Any = None) -> AsyncGenerator[Any, None]:
    yield {}


async def _peer_router(library: Any, folder: Path, workers: int) -> tuple[Any, list[int]]:
    """Return its router over this many workers, and their ids."""
    runtime = library.DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")
    endpoint = runtime.endpoint("bench.backend.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(_no_answer))
    await asyncio.sleep(1)
    kind = library.ModelInput.Tensor, library.ModelType.TensorBased
    settings = {"runtime_config": library.ModelRuntimeConfig(), "worker_type": library.WorkerType.Aggregated}
    await library.register_model(*kind, endpoint, "m", **settings)
    ids = _copy_worker(folder, workers)
    await asyncio.sleep(1)  # until it has read them
    config = library.KvRouterConfig(use_kv_events=False, router_ttl_secs=FOREVER_S)
    router = await asyncio.to_thread(library.KvRouter, endpoint, BLOCK_TOKENS, config)
    await asyncio.sleep(1)
    assert not serving.done()
    return router, ids


def _copy_worker(folder: Path, workers: int) -> list[int]:
    """Copy the entries of the one worker, which are named by its id, to make this many; return their ids."""
    ids = set(range(1, workers))
    for entry in [path for path in folder.rglob("*") if path.is_file()]:
        name, text = entry.name.rsplit("%2F", 1)[-1], entry.read_text()
        own = int(name, 16)
        for i in range(1, workers):
            copied = text.replace(name, f"{i:x}").replace(str(own), str(i))
            entry.with_name(entry.name.replace(name, f"{i:x}")).write_text(copied)
        ids.add(own)
    assert len(ids) == workers
    return sorted(ids)


# -- measuring


def _deepest(find: Callable[[Any], Any], hashed: Callable[[list[int]], Any]) -> Query:
    """Return a query of the parts: the depth of the match of each worker, and the deepest of them."""

    async def query(tokens: list[int]) -> Any:
        scores = find(hashed(tokens))
        return scores[max(scores, key=scores.get)] if scores else 0

    return query


async def _seconds(workers: int) -> list[float]:
    """Return the mean seconds of a query: of our parts and our router and, if installed, of the other ones."""
    library, given = peer_library(), prompts()
    sample = given[:: max(1, len(given) // QUERIES)]
    with TemporaryDirectory() as folder:
        os.environ["DYN_FILE_KV"] = folder
        peer: Any = None
        tree: Any = None
        if library is not None:
            tree = library.RadixTree()
            peer, ids = await _peer_router(library, Path(folder), workers)
            put: Query = partial(peer.best_worker, router_config_override=SPREAD, update_indexer=True)
        else:
            ids, put = list(range(workers)), _at_random(workers)
        ours, index = _ours(ids), KvIndex()
        for number, tokens in enumerate(given):
            rank = WorkerRank(*(await put(tokens))[:2])
            blocks = PromptBlocks(tokens, BLOCK_TOKENS)
            pairs = list(zip(blocks.sequence_hashes, blocks.local_hashes, strict=True))
            stored = Stored(rank.worker_id, number + 1, None, pairs)
            ours.lookup.record(rank, blocks, 0.0)
            index.apply(stored.as_event())
            if library is not None:
                tree.apply_event(rank.worker_id, stored.as_json())
        queries = [
            _deepest(
                lambda local: index.find_matches(local).by_rank(),
                lambda tokens: PromptBlocks(tokens, BLOCK_TOKENS).local_hashes,
            ),
            _advised(ours),
        ]
        if library is not None:
            hashed = partial(library.compute_block_hash_for_seq, kv_block_size=BLOCK_TOKENS)
            queries += [_deepest(lambda local: tree.find_matches(local).scores, hashed), peer.best_worker]
            await _same_answers(queries, sample)
        return await _fastest(queries, sample)


def _at_random(workers: int) -> Query:
    random = Random(1)

    async def put(tokens: list[int]) -> Any:
        return random.randrange(workers), 0

    return put


def _found_in(index: KvIndex) -> Callable[[Any], Any]:
    return lambda local_hashes: index.find_matches(local_hashes).by_rank()


def _advised(router: KvRouter) -> Query:
    async def query(tokens: list[int]) -> Any:
        return router.advise(RouteRequest(blocks=PromptBlocks(tokens, BLOCK_TOKENS)))

    return query


async def _same_answers(queries: list[Query], sample: list[list[int]]) -> None:
    for tokens in sample:
        our_depth, decision, its_depth, chosen = [await query(tokens) for query in queries]
        assert our_depth == its_depth == decision.overlap_blocks == chosen[2]


async def _fastest(queries: list[Query], sample: list[list[int]]) -> list[float]:
    """Return the seconds of the fastest of some passes of each query, in turn."""
    best = [float("inf")] * len(queries)
    for _ in range(REPEATS):
        took = [0.0] * len(queries)
        for tokens in sample:
            for i, query in enumerate(queries):
                start = perf_counter()
                await query(tokens)
                took[i] += perf_counter() - start
        best = [min(one, seconds / len(sample)) for one, seconds in zip(best, took, strict=True)]
    return best


def _results(workers: int) -> list[Result]:
    command = [sys.executable, "-m", "benchmarks.kv_choice", str(workers)]
    run = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "DYN_LOG": "error"})
    figures = [1e6 * seconds for seconds in json.loads(run.stdout.splitlines()[-1])]
    names = [f"tokens to deepest rank, {workers} workers", f"tokens to worker by router, {workers} workers"]
    peers = figures[len(names) :] or [None] * len(names)
    return [
        Result(name, ours, "µs", peer, "≤ 2/3 peer") for name, ours, peer in zip(names, figures, peers, strict=False)
    ]


async def measure() -> list[Result]:
    """Measure both ways for each number of workers."""
    return [result for workers in WORKERS for result in _results(workers)]


if __name__ == "__main__":
    if len(sys.argv) == 1:
        show(asyncio.run(measure()))
    else:
        print(json.dumps(asyncio.run(_seconds(int(sys.argv[1])))), flush=True)
        os._exit(0)  # the other library's threads do not end with the interpreter
