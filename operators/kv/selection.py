"""select_worker: one of the candidates, by cost, expected or marginal delay, with the reasons. Pure.

Source: dynamo lib/kv-router/src/scheduling/selector/default.rs, DefaultWorkerPicker. Other than there the random
numbers come from outside, so the same generator makes the same choices; and the rule has a name.

The cost of sending a request to each of some ranks, in blocks; lower is better.

    cost = prefill_load_scale * max(0, prompt work in flight and new - credit for what is cached)
           + decode blocks held and added + decode_active_request_weight * requests

Columns in, one column out, in the order of the candidates: for hundreds of them a call each would cost more than the
arithmetic.

Source: dynamo lib/kv-router/src/scheduling/selector/default.rs, DefaultWorkerScorer. Other than there a rank without a
load record counts as idle, so it also pays for the blocks the prompt would add.

The expected delay a request causes on each of some ranks, in prompt tokens; lower is better.

    delay = (QUEUED * prompt tokens in flight                            it waits for these before its first token,
             + new tokens                                                and for its own
             + DISPLACED * congestion * new tokens                       what computing and keeping them does to others,
             + new tokens in the pass of prompts that wait               to the next first token there,
             + pause * requests * (new tokens + PASS_TOKENS * passes)    and to the answers
             + REQUEST_TOKENS * requests
             + pause * answer * STEP * tokens in blocks                  how slowly its own answer comes, and others
            ) * slowness

The queueing rule "shortest expected delay", with a charge for the delay of others. The unit is the time to compute one
prompt token. `pause`, `answer`, `congestion` and `slowness` are what the router has observed, see `Pace`.

The cost counts a block that is held like one that is to be computed. A prompt token takes its time once and whole; a
block that is held makes each step of its rank a little longer. Where prompts are much longer than answers the cost
therefore sends conversations away from their caches, to save next to nothing. Here what is held counts little, and
cached tokens are worth more than the time to compute them again, because a second copy displaces something.

Prompts that wait together are computed in one pass, so a prompt pauses the answers of a rank less where one waits
already. Of short prompts before long answers more are then computed together, which is what an overloaded fleet needs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Literal

from attrs import define, field

from pipeline import InvalidArgument, Unavailable
from pipeline.protocols import RouterConfigOverride

from .config import KvRouterConfig
from .decision import Decision, Judged, Prompt
from .eligibility import Candidates
from .index import CandidateOverlap, Overlap, in_tokens
from .load import Column, RankLoads, Weights
from .marginal import marginal_delays, marginal_weights
from .pace import UNOBSERVED, Pace
from .rates import BATCH_TOKENS, PASS_TOKENS, STEP
from .types import PlacementRule, RequestSettings

WorkerType = Literal["aggregated", "prefill", "decode"]


def costs(
    prompt: Prompt,
    overlap: CandidateOverlap,
    loads: RankLoads,
    settings: RequestSettings,
    worker_type: WorkerType = "aggregated",
) -> list[float]:
    """The cost for each candidate, in the order of the columns of `loads` and `overlap`."""
    if not settings.track_prefill_tokens:
        return _decode_costs(prompt, overlap, loads, settings, worker_type)
    credit = cache_credits(prompt, overlap, loads.prefill_tokens, settings)
    prompt_tokens = _prompt_tokens(prompt, overlap, settings)
    size, scale, weight = prompt.block_size_tokens, settings.prefill_load_scale, settings.decode_active_request_weight
    columns = zip(
        loads.prefill_tokens,
        prompt_tokens,
        credit,
        loads.decode_blocks,
        loads.additional_blocks,
        _request_costs(loads.requests, weight),
        strict=True,
    )
    return [
        (scale * work if (work := (active + new) / size - saved) > 0.0 else 0.0) + held + added + by_requests
        for active, new, saved, held, added, by_requests in columns
    ]


def _decode_costs(
    prompt: Prompt, overlap: CandidateOverlap, loads: RankLoads, settings: RequestSettings, worker_type: WorkerType
) -> list[float]:
    """The cost where prompts are not tracked: there is no prompt work to save.

    A decode worker with credit is still chosen by what it has cached: there the credit is taken off the decode blocks.
    """
    weight = settings.decode_active_request_weight
    columns = loads.decode_blocks, loads.additional_blocks, _request_costs(loads.requests, weight)
    if worker_type != "decode" or settings.overlap_score_credit <= 0:
        return [held + added + by_requests for held, added, by_requests in zip(*columns, strict=True)]
    credit = cache_credits(prompt, overlap, loads.prefill_tokens, settings)
    return [
        max(0.0, held + added - saved) + by_requests
        for held, added, by_requests, saved in zip(*columns, credit, strict=True)
    ]


def _request_costs(requests: Column, weight: float) -> list[float]:
    return [weight * count for count in requests] if weight else [0.0] * len(requests)


def cache_credits(
    prompt: Prompt, overlap: CandidateOverlap, prefill_tokens: Column, settings: RequestSettings
) -> list[float]:
    """The blocks each candidate saves by what is cached, every tier at its weight."""
    column = _device_credits(prompt, overlap.device, prefill_tokens, settings)
    if (multiplier := settings.shared_cache_multiplier) and overlap.overlap.shared:
        beyond = {blocks: multiplier * overlap.overlap.shared_blocks_beyond(blocks) for blocks in set(overlap.device)}
        column = [beyond[blocks] + credit for blocks, credit in zip(overlap.device, column, strict=True)]
    return overlap.with_lower_tiers(column, settings)


def _device_credits(
    prompt: Prompt, device: Sequence[float], prefill_tokens: Column, settings: RequestSettings
) -> Sequence[float]:
    credit, decay = settings.overlap_score_credit, settings.overlap_score_credit_decay
    if decay > 0 and settings.track_prefill_tokens:
        decays = _decays(prompt, prefill_tokens, decay)
        return [credit * left * blocks for left, blocks in zip(decays, device, strict=True)]
    return device if credit == 1.0 else [credit * blocks for blocks in device]


def _decays(prompt: Prompt, prefill_tokens: Column, decay: float) -> list[float]:
    """What is left of the device credit on ranks that have more prompt work in flight than the calmest candidate."""
    least = min(prefill_tokens, default=0)
    size, blocks = prompt.block_size_tokens, max(1, prompt.blocks)
    return [1.0 / (1.0 + decay * ((tokens - least) / size / blocks)) for tokens in prefill_tokens]


def _prompt_tokens(prompt: Prompt, overlap: CandidateOverlap, settings: RequestSettings) -> list[int]:
    """The tokens each candidate would have to look at: the prompt, or more where more than the prompt is cached."""
    isl, size = prompt.isl_tokens, prompt.block_size_tokens
    if not overlap.overlap.has_lower_tiers and overlap.best_device * size <= isl:
        return [isl] * len(overlap.device)
    cached = overlap.with_lower_tiers(overlap.device, settings)
    return [isl if blocks * size <= isl else int(blocks * size + 0.5) for blocks in cached]


QUEUED = 2.0
"""What a token that waits or is computed counts for: passes also take a fixed time and that of the answers' steps, and
who waits longest decides the last percent."""
DISPLACED = 2.0
"""What a new token is charged for what it does to others: while it is computed those that come wait, and it evicts one
that may be needed again, which then takes as long. Without it prefixes are copied wherever the queue is a little
shorter. Times the congestion, for all of that is waited for by more where more wait."""
REQUEST_TOKENS = 1024
"""What a request in flight counts for besides its blocks: it has its part of each batch. It also bounds affinity: a
rank with all of a prompt gets it with at most `(1 + DISPLACED * congestion) * prompt tokens / REQUEST_TOKENS` requests
more than an idle one has."""


def delays(
    prompt: Prompt,
    overlap: CandidateOverlap,
    loads: RankLoads,
    settings: RequestSettings,
    worker_type: WorkerType = "aggregated",
    pace: Pace = UNOBSERVED,
) -> list[float]:
    """The delay for each candidate, before its slowness, in the order of the columns of `loads` and `overlap`.

    What is cached counts as for the cost, with its credit, decay and weights of tiers, up to the whole prompt; the
    other weights of the cost are not read. Where prompts are not tracked the queues are unknown, and this is the cost.
    """
    if not settings.track_prefill_tokens:
        return costs(prompt, overlap, loads, settings, worker_type)
    isl, size = prompt.isl_tokens, prompt.block_size_tokens
    cached = _cached_of_prompt(prompt, overlap, loads, settings)
    alone, held_tokens = 1.0 + DISPLACED * pace.congestion, _held_tokens(prompt, pace)
    pause, grown, batch = pace.pause_weight, 0.5 * held_tokens, BATCH_TOKENS
    columns = zip(
        loads.prefill_tokens, cached, loads.requests, loads.decode_blocks, loads.additional_blocks, strict=True
    )
    # No calls for each rank; `-(-a // b)` is a / b rounded up. Where nothing is new, the last token is computed.
    return [
        QUEUED * active
        + alone * (new := isl - size * blocks)
        + ((new if new < (room := batch - active) else room if room > 0 else 0.0) if active else 0.0)
        + requests
        * (
            REQUEST_TOKENS
            + pause * (new + PASS_TOKENS * (-active // batch - -(active + (new if new > 1.0 else 1.0)) // batch))
            + grown * added
        )
        + held_tokens * (held + added)
        for active, blocks, requests, held, added in columns
    ]


def _cached_of_prompt(
    prompt: Prompt, overlap: CandidateOverlap, loads: RankLoads, settings: RequestSettings
) -> list[float]:
    """The blocks each candidate saves by what is cached, at most the whole prompt."""
    cached = cache_credits(prompt, overlap, loads.prefill_tokens, settings)
    if max(cached, default=0.0) > (most := prompt.isl_tokens / prompt.block_size_tokens):
        return [min(blocks, most) for blocks in cached]
    return cached


def _held_tokens(prompt: Prompt, pace: Pace) -> float:
    """What a block that is held adds to the delay of an answer."""
    return pace.pause_weight * pace.answer_tokens * STEP * prompt.block_size_tokens


Rule = Callable[[Prompt, CandidateOverlap, RankLoads, RequestSettings, WorkerType, Pace], list[float]]
RULES: Mapping[PlacementRule, Rule] = {
    "cost": lambda prompt, overlap, loads, settings, worker_type, _: costs(
        prompt, overlap, loads, settings, worker_type
    ),
    "expected_delay": delays,
    "marginal_delay": lambda prompt, overlap, loads, settings, worker_type, pace: (
        marginal_delays(prompt, _cached_of_prompt(prompt, overlap, loads, settings), loads, pace)
        if settings.track_prefill_tokens
        else costs(prompt, overlap, loads, settings, worker_type)  # the queues are unknown
    ),
}


def load_weights(prompt: Prompt, settings: RequestSettings, pace: Pace) -> Weights:
    """What a load adds at least to the cost of a rank that was idle, before its slowness.

    Holds for the placement of the settings where prompts are tracked and credit neither decays nor exceeds 1.
    """
    if settings.placement == "marginal_delay":
        return marginal_weights(prompt, pace)
    if settings.placement == "expected_delay":
        return Weights(QUEUED, _held_tokens(prompt, pace), REQUEST_TOKENS)
    return Weights(settings.prefill_load_scale / prompt.block_size_tokens, 1.0, settings.decode_active_request_weight)


def goes_by_delay(settings: RequestSettings) -> bool:
    """Whether the costs are delays, which are longer on a slower rank."""
    return settings.placement != "cost" and settings.track_prefill_tokens


def judge(
    prompt: Prompt,
    candidates: Candidates,
    overlap: Overlap,
    loads: RankLoads,
    settings: RequestSettings,
    worker_type: WorkerType = "aggregated",
    pace: Pace = UNOBSERVED,
) -> Judged:
    """All candidates by the rule of the settings; `loads` are theirs, in their order."""
    seen = CandidateOverlap(overlap, candidates.zero_by_rank)
    column = RULES[settings.placement](prompt, seen, loads, settings, worker_type, pace)
    slowness = pace.multipliers(candidates.ranks) if goes_by_delay(settings) else None
    for multipliers in (candidates.multipliers, slowness):
        if multipliers is not None:
            column = [cost * multiplier for cost, multiplier in zip(column, multipliers, strict=True)]
    return Judged(column, loads, seen.device)


def select_worker(
    prompt: Prompt,
    candidates: Candidates,
    overlap: Overlap,
    loads: RankLoads,
    settings: RequestSettings,
    rng: Random,
    worker_type: WorkerType = "aggregated",
    pace: Pace = UNOBSERVED,
) -> Decision:
    """The cheapest candidate, or with a temperature a random one that is likelier the cheaper it is.

    `loads` are those of the candidates' ranks, in their order. Raises InvalidArgument for a prompt without tokens,
    Unavailable without candidates.
    """
    if prompt.isl_tokens < 1:
        raise InvalidArgument("must have at least one token", field="token_ids")
    if not candidates.ranks:
        raise Unavailable("no worker can take this request")
    judged = judge(prompt, candidates, overlap, loads, settings, worker_type, pace)
    position = pick(judged.costs, settings.temperature, rng)
    rank = candidates.ranks[position]
    blocks = judged.device[position]
    effective_blocks = overlap.effective_blocks(rank, settings) if overlap.has_lower_tiers else blocks
    return Decision(
        rank,
        judged.costs[position],
        blocks,
        max(judged.device),
        effective_blocks,
        in_tokens(effective_blocks, prompt.block_size_tokens),
        prompt,
        candidates.ranks,
        overlap,
        settings.placement,
        lambda: judged,
    )


@define(eq=False)
class WorkerSelector:
    """By what one router selects ranks."""

    config: KvRouterConfig
    rng: Random = field(factory=Random)
    """Decides between equal costs; a seeded one repeats a run."""
    worker_type: WorkerType = "aggregated"
    """What the workers of the pool do."""
    _settings: RequestSettings = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._settings = self.config.settings()

    def settings(self, override: RouterConfigOverride | None) -> RequestSettings:
        """The router's settings, with what a request overrides."""
        return self._settings if override is None else self.config.settings(override)


def pick(costs: Sequence[float], temperature: float, rng: Random) -> int:
    """The position of the chosen cost; equal lowest ones are equally likely. Draws only where there is a choice."""
    if temperature > 0 and len(costs) > 1:
        return _sample(_weights(costs, temperature), rng.random())
    lowest = min(costs)
    if costs.count(lowest) == 1:
        return costs.index(lowest)
    return rng.choice([position for position, cost in enumerate(costs) if cost == lowest])


def _weights(costs: Sequence[float], temperature: float) -> list[float]:
    """How likely each is, up to a factor: 1 for the lowest cost, exp(-1/temperature) for the highest."""
    # Halved, and never infinite: the difference of two extreme costs may be more than a number can hold.
    halves = [min(cost, sys.float_info.max) / 2 for cost in costs]
    lowest = min(halves)
    span = max(halves) - lowest
    if span == 0:
        return [1.0] * len(costs)
    return [math.exp(-((half - lowest) / span) / temperature) for half in halves]


def _sample(weights: Sequence[float], sample: float) -> int:
    """The first position at which the weights so far make up this share of all."""
    share, so_far = sample * sum(weights), 0.0
    for position, weight in enumerate(weights):
        so_far += weight
        if so_far >= share:
            return position
    return len(weights) - 1
