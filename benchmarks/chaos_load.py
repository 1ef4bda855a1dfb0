"""What `benchmarks.chaos` replays: made up conversations, and a script of faults that fits a trace."""

from __future__ import annotations

from array import array
from itertools import count
from random import Random

from serving.replay import Action, Fault, Prompt, RollingRestart, Session, Trace, Turn
from serving.replay.samples import Role

BLOCK_TOKENS = 512
TURNS = (1, 6)
SYSTEM_BLOCKS = (1, 6)
SYSTEM_PROMPTS = 12
QUESTION_BLOCKS = (1, 8)
ANSWER_TOKENS_MEAN = 120
ANSWER_TOKENS_MAX = 800
ARRIVALS_PER_S = 1.5
THINKING_MS = 8000.0


def conversation_load(requests: int, rng: Random, arrivals_per_s: float = ARRIVALS_PER_S) -> Trace:
    """So many requests in sessions of some turns; each prompt is the one before and something new, and begins with one
    of a few system prompts. Lengths, arrivals of sessions and times to think are drawn."""
    ids, arrival_ms, left = count(1), 0.0, requests
    sessions: list[Session] = []
    systems = [_new(ids, rng.randint(*SYSTEM_BLOCKS)) for _ in range(SYSTEM_PROMPTS)]
    while left:
        turns = min(left, rng.randint(*TURNS))
        left -= turns
        arrival_ms += rng.expovariate(arrivals_per_s) * 1000
        name, blocks = f"session {len(sessions)}", rng.choice(systems)[:]
        sessions.append(
            Session(name, tuple(_turn(name, at, blocks, ids, rng) for at in range(turns)), arrival_ms, is_named=False)
        )
    return Trace(tuple(sessions))


def _new(ids: count[int], blocks: int) -> array[int]:
    return array("I", [next(ids) for _ in range(blocks)])


def _turn(session: str, at: int, blocks: array[int], ids: count[int], rng: Random) -> Turn:
    """The next turn; the blocks of the conversation grow by it."""
    blocks.extend(_new(ids, rng.randint(*QUESTION_BLOCKS)))
    tokens = len(blocks) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
    answer = min(ANSWER_TOKENS_MAX, 1 + int(rng.expovariate(1 / ANSWER_TOKENS_MEAN)))
    delay_ms = rng.expovariate(1 / THINKING_MS) if at else 0.0
    return Turn(f"{session}:{at}", 0, Prompt.of(blocks[:], BLOCK_TOKENS, tokens), answer, delay_ms)


def chaos_script(
    trace: Trace, workers: int, prefill_workers: int, *, deaths: int, rng: Random
) -> list[Fault | RollingRestart]:
    """Faults that fit the time in which requests come: in the first half `deaths` workers of each pool die and return,
    some of both pools at once; then all restart, one after the other; at last some of them die again.

    In each pool one worker at least is there at any time, if it has two.
    """
    lasts_ms = max((one.arrival_ms or 0.0) + sum(turn.delay_ms for turn in one.turns) for one in trace.sessions)
    pools: tuple[tuple[Role, int], ...] = (("decode", workers), ("prefill", prefill_workers))
    script: list[Fault | RollingRestart] = []
    for role, size in pools:
        gap_ms = 0.5 * lasts_ms / deaths
        for at in range(deaths):
            # Every third time workers of both pools die in the same moment.
            when_ms = 0.05 * lasts_ms + gap_ms * (at + (0.0 if at % 3 == 0 else 0.5 * rng.random()))
            script += _dies(when_ms, at % size, role, min(0.4 * gap_ms, rng.uniform(100, 20_000)))
        every_ms = 0.2 * lasts_ms / size
        script.append(RollingRestart(0.6 * lasts_ms, every_ms, min(0.5 * every_ms, 5_000), role))
        for at in range(size):
            script += _dies((0.85 + 0.1 * at / size) * lasts_ms, at, role, 0.05 * lasts_ms / size)
    return script


def _dies(when_ms: float, worker: int, role: Role, down_ms: float) -> list[Fault]:
    return [Fault(when_ms, worker, Action.DIES, role), Fault(when_ms + down_ms, worker, Action.RETURNS, role)]
