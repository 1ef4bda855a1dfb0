"""The marginal delay that a request causes on each of some ranks, in prompt tokens; lower is better.

    delay = (  prompt tokens in flight + new                       it waits for these before its first token,
             + (passes + half of one under way) * (a pass + step)  for their passes, each with a step of answers,
             + (requests beyond the seats) * answer / seats * step for a seat, where all are taken,
             + DISPLACED * new                                     others later for what is new,
             + new tokens in the pass of prompts that wait         and those that share a pass with it
             + felt * read * (held + requests * answer / 2)        time per token of its own answer
             + felt * requests * read / 2 * (added + answer / 2)   of the others: longer steps,
             + sqrt(felt * FELT_TOKENS)                            and pauses
                 * requests * (new + a pass * more passes) / answer
             + FELT_TOKENS                                         and of the turns that follow
                 * returns * STEP_TOKENS * log(1 + STEP * lately / STEP_TOKENS)
            ) * slowness

What is minimized is the time to the first token and some times the time per token: of the request, and of all that it
delays. The unit is the time to compute one prompt token, that of `held`, `added` and `lately` a token in the cache.
What a pass and a step take, reading (`read`) a token in the cache, and the seats, the requests that a rank runs at a
time, are the `EngineCosts`. `answer`, `returns` and `slowness` are what the router has observed, see `Pace`. So is
`felt`: the mean time to the first token by the mean time per token, at most FELT_TOKENS. A percent of the one then
counts as much as a percent of the other. Pauses count by the geometric mean of both: answers that last longer meet more
passes, which pause them again. The turns that follow count by FELT_TOKENS and the usual costs of a step, whatever the
fleet is like now: by costs of its own, sessions leave their caches where steps take long.

A conversation stays where its prompt is cached. Where prompts come back, the load of a moment is chance, and that of
late is what the next turns will find. There a part more or less of the time per token counts the same on full ranks as
on empty ones: where all are full, to compute a prompt again saves a smaller part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log1p, sqrt

from .decision import Prompt
from .load import RankLoads, Weights
from .pace import Pace
from .rates import USUAL

FELT_TOKENS = 20.0
"""What a time per token counts at most beside the same time to a first token: what counts is the time of this token."""
DISPLACED = 2.0
"""What a new token is charged for those that come later: while it is computed they wait, and it evicts one that may be
needed again. Without it prefixes are copied wherever the queue is a little shorter."""
UNDER_WAY = 0.5
"""The part of a pass under way that is still to come, on average: a prompt cannot join it, and waits for its end."""


def marginal_delays(prompt: Prompt, cached: Sequence[float], loads: RankLoads, pace: Pace) -> list[float]:
    """The delay for each rank, before its slowness, in the order of the columns of `loads`.

    `cached` are the blocks that each has of the prompt, at most all of it.
    """
    isl, size, answer, costs = prompt.isl_tokens, prompt.block_size_tokens, max(1.0, pace.answer_tokens), pace.costs
    batch, whole = costs.batch_tokens, costs.pass_tokens
    felt = felt_tokens(pace)
    step = costs.step_tokens if pace.pause_weight else 0.0  # answers of one token have no steps
    read = costs.step * size if step else 0.0  # what a block adds to a step
    paused, lengthened, grown = sqrt(felt * FELT_TOKENS) / answer, 0.5 * felt * read, 0.75 * felt * costs.step * answer
    free, turn = _seats(pace)
    columns = zip(
        loads.prefill_tokens, cached, loads.requests, loads.decode_blocks, loads.additional_blocks, strict=True
    )
    # No calls for each rank; `-(-a // b)` is a / b rounded up. Where nothing is new, the last token is computed.
    delays = [
        active
        + (1.0 + DISPLACED) * (new := isl - size * blocks)
        + ((passes := -(-(active + (new if new > 1.0 else 1.0)) // batch)) + (UNDER_WAY if active else 0.0))
        * (whole + (step + read * (held + added) if requests else 0.0))
        + ((new if new < (room := batch - active) else room if room > 0 else 0.0) if active else 0.0)
        + felt * read * (held + added)
        + (turn * (requests - free) * (step + read * held) if requests > free else 0.0)
        + requests * (paused * (new + whole * (passes + -active // batch)) + lengthened * added + grown)
        for active, blocks, requests, held, added in columns
    ]
    if not loads.blocks_lately or not step or not pace.returns:
        return delays
    weight, part = _turns(pace, size)
    return [delay + weight * log1p(part * held) for delay, held in zip(delays, loads.blocks_lately, strict=True)]


def felt_tokens(pace: Pace) -> float:
    """What a time per token counts beside the same time to a first token; 0 where answers are of one token."""
    return min(FELT_TOKENS, pace.pause_weight * max(1.0, pace.answer_tokens))


def _seats(pace: Pace) -> tuple[float, float]:
    """The requests of a rank at which a further one has a seat at once, and in how many steps the next one is free."""
    if pace.costs.seats is None or not pace.pause_weight:
        return inf, 0.0
    return pace.costs.seats - 1, max(1.0, pace.answer_tokens) / pace.costs.seats


def _turns(pace: Pace, block_size_tokens: int) -> tuple[float, float]:
    """What the turns that follow count, and the part of a step that a block is."""
    return FELT_TOKENS * pace.returns * USUAL.step_tokens, USUAL.step * block_size_tokens / USUAL.step_tokens


def marginal_weights(prompt: Prompt, pace: Pace) -> Weights:
    """What a load adds at least to the delay for a rank that was idle, before its slowness."""
    if not pace.pause_weight:
        return Weights(1.0, 0.0, 0.0)
    costs, felt = pace.costs, felt_tokens(pace)
    read, step, (free, turn) = costs.step * prompt.block_size_tokens, costs.step_tokens, _seats(pace)
    grown = 0.75 * felt * costs.step * max(1.0, pace.answer_tokens)
    return Weights(
        1.0, (felt + 1.0) * read, grown, step, *_turns(pace, prompt.block_size_tokens), free, turn * step, turn * read
    )
