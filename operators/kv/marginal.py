"""The marginal delay that a request causes on each of some ranks, in prompt tokens; lower is better.

    delay = (  prompt tokens in flight + new                       it waits for these before its first token,
             + (passes + half of one under way) * (PASS_TOKENS + step)   for their passes, each with a step of answers,
             + DISPLACED * new                                     others later for what is new,
             + new tokens in the pass of prompts that wait         and those that share a pass with it
             + felt * STEP * (held + requests * answer / 2)        time per token of its own answer
             + felt * requests * STEP / 2 * (added + answer / 2)   of the others: longer steps,
             + sqrt(felt * FELT_TOKENS)                            and pauses
                 * requests * (new + PASS_TOKENS * more passes) / answer
             + FELT_TOKENS                                         and of the turns that follow
                 * returns * STEP_TOKENS * log(1 + STEP * lately / STEP_TOKENS)
            ) * slowness

What is minimized is the time to the first token and some times the time per token: of the request, and of all that it
delays. The unit is the time to compute one prompt token, that of `held`, `added` and `lately` a token in the cache.
`answer`, `returns` and `slowness` are what the router has observed, see `Pace`. So is `felt`: the mean time to the
first token by the mean time per token, at most FELT_TOKENS. A percent of the one then counts as much as a percent of
the other. Pauses count by the geometric mean of both: answers that last longer meet more passes, which pause them
again. The turns that follow count by FELT_TOKENS, whatever the fleet is like now.

A conversation stays where its prompt is cached. Where prompts come back, the load of a moment is chance, and that of
late is what the next turns will find. There a part more or less of the time per token counts the same on full ranks as
on empty ones: where all are full, to compute a prompt again saves a smaller part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p, sqrt

from .decision import Prompt
from .load import RankLoads, Weights
from .pace import BATCH_TOKENS, PASS_TOKENS, STEP, Pace

FELT_TOKENS = 20.0
"""What a time per token counts at most beside the same time to a first token: what counts is the time of this token."""
DISPLACED = 2.0
"""What a new token is charged for those that come later: while it is computed they wait, and it evicts one that may be
needed again. Without it prefixes are copied wherever the queue is a little shorter."""
STEP_TOKENS = 384.0
"""What a step of answers takes besides reading the cache: as long as computing so many prompt tokens."""
UNDER_WAY = 0.5
"""The part of a pass under way that is still to come, on average: a prompt cannot join it, and waits for its end."""


def marginal_delays(prompt: Prompt, cached: Sequence[float], loads: RankLoads, pace: Pace) -> list[float]:
    """The delay for each rank, before its slowness, in the order of the columns of `loads`.

    `cached` are the blocks that each has of the prompt, at most all of it.
    """
    isl, size, batch, answer = prompt.isl_tokens, prompt.block_size_tokens, BATCH_TOKENS, max(1.0, pace.answer_tokens)
    felt, step = felt_tokens(pace), STEP_TOKENS if pace.pause_weight else 0.0  # answers of one token have no steps
    read = STEP * size if step else 0.0  # what a block adds to a step
    paused, lengthened, grown = sqrt(felt * FELT_TOKENS) / answer, 0.5 * felt * read, 0.75 * felt * STEP * answer
    columns = zip(
        loads.prefill_tokens, cached, loads.requests, loads.decode_blocks, loads.additional_blocks, strict=True
    )
    # No calls for each rank; `-(-a // b)` is a / b rounded up. Where nothing is new, the last token is computed.
    delays = [
        active
        + (1.0 + DISPLACED) * (new := isl - size * blocks)
        + ((passes := -(-(active + (new if new > 1.0 else 1.0)) // batch)) + (UNDER_WAY if active else 0.0))
        * (PASS_TOKENS + (step + read * (held + added) if requests else 0.0))
        + ((new if new < (room := batch - active) else room if room > 0 else 0.0) if active else 0.0)
        + felt * read * (held + added)
        + requests * (paused * (new + PASS_TOKENS * (passes + -active // batch)) + lengthened * added + grown)
        for active, blocks, requests, held, added in columns
    ]
    if not loads.blocks_lately or not (weight := FELT_TOKENS * pace.returns * step):
        return delays
    part = read / step
    return [delay + weight * log1p(part * held) for delay, held in zip(delays, loads.blocks_lately, strict=True)]


def felt_tokens(pace: Pace) -> float:
    """What a time per token counts beside the same time to a first token; 0 where answers are of one token."""
    return min(FELT_TOKENS, pace.pause_weight * max(1.0, pace.answer_tokens))


def marginal_weights(prompt: Prompt, pace: Pace) -> Weights:
    """What a load adds at least to the delay for a rank that was idle, before its slowness."""
    if not pace.pause_weight:
        return Weights(1.0, 0.0, 0.0)
    read, felt = STEP * prompt.block_size_tokens, felt_tokens(pace)
    grown, weight = 0.75 * felt * STEP * max(1.0, pace.answer_tokens), FELT_TOKENS * pace.returns * STEP_TOKENS
    return Weights(1.0, (felt + 1.0) * read, grown, STEP_TOKENS, weight, read / STEP_TOKENS)
