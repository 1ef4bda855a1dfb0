"""The expected delay a request causes on each of some ranks, in prompt tokens; lower is better.

    delay = prompt tokens in flight + new tokens                      it waits for these before its first token
          + new tokens * (DISPLACED + STALLED * requests)             what computing and keeping them does to others
          + REQUEST_TOKENS * requests + HELD * tokens in blocks held  how slowly its own output comes

The queueing rule "shortest expected delay", with a charge for the delay of others. The unit is the time to compute one
prompt token, so no rate has to be known or learned, and blocks of another size change nothing.

The cost counts a block that is held like one that is to be computed. A prompt token takes its time once and whole; a
block that is held makes each step of its rank a little longer. Where prompts are much longer than answers the cost
therefore sends conversations away from their caches, to save next to nothing. Here what is held counts little, and
cached tokens are worth more than the time to compute them again, because a second copy displaces something.
"""

from __future__ import annotations

from .active_sequences_loads import RankLoads
from .config_settings import RequestSettings
from .cost import Prompt, WorkerType, cache_credits, costs
from .overlap import CandidateOverlap

DISPLACED = 1.0
"""What a new token is charged for its place in the cache: it drives one out that may be asked for again, which then
takes as long as this one. Without it prefixes are copied wherever the queue is a little shorter."""
STALLED = 0.1
"""What each request in flight is charged for while the rank computes a new token. It loses all of that time, but as a
pause in its output, which is taken as a tenth of the wait for a first token."""
REQUEST_TOKENS = 1024
"""What a request in flight counts for besides its blocks: it has its part of each batch. It also bounds affinity: a
rank with all of a prompt gets it with at most `(1 + DISPLACED) * prompt tokens / REQUEST_TOKENS` requests more than an
idle one has."""
HELD = 0.05
"""What a token in a block that is held counts for: it costs each later step far less than its computing took. Not
nothing: of ranks equal otherwise the one with more room wins, and none is filled while others are empty."""


def delays(
    prompt: Prompt,
    overlap: CandidateOverlap,
    loads: RankLoads,
    settings: RequestSettings,
    worker_type: WorkerType = "aggregated",
) -> list[float]:
    """The delay for each candidate, in the order of the columns of `loads` and `overlap`.

    What is cached counts as for the cost, with its credit, decay and weights of tiers, up to the whole prompt; the
    other weights of the cost are not read. Where prompts are not tracked nobody knows the queues, and this is the cost.
    """
    if not settings.track_prefill_tokens:
        return costs(prompt, overlap, loads, settings, worker_type)
    isl, size = prompt.isl_tokens, prompt.block_size_tokens
    cached = cache_credits(prompt, overlap, loads.prefill_tokens, settings)
    if max(cached, default=0.0) > (most := isl / size):
        cached = [min(blocks, most) for blocks in cached]
    alone, held_tokens = 1.0 + DISPLACED, HELD * size
    columns = zip(
        loads.prefill_tokens, cached, loads.requests, loads.decode_blocks, loads.additional_blocks, strict=True
    )
    return [
        active
        + alone * (new := isl - size * blocks)
        + requests * (REQUEST_TOKENS + STALLED * new)
        + held_tokens * (held + added)
        for active, blocks, requests, held, added in columns
    ]
