"""ReportedRates: what the workers of one router report of their passes, and what the rules make of it.

    RankRates of the event plane ──► by rank ──► slowness of each, what a pass and a step cost in prompt tokens
    cards ─────────────────────────► tokens of a pass, requests that a rank runs

Ranks of nearly the same speed count as equal, so that alike workers stay alike; of what differs from rank to rank only
the speed is told apart, all else is of the rank in the middle.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from math import exp, fsum, log
from operator import attrgetter
from statistics import median

from attrs import astuple, define, field, frozen

from pipeline.network import EndpointId, EventPlane, Scope
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.kv import KV_RATES_TOPIC, PassRates, RankRates
from pipeline.rx import Observable, ops

from .types import WorkerRank

_log = logging.getLogger(__name__)

PASS_TOKENS = 1024
"""What a pass of an engine takes besides its prompt tokens, in such tokens: as long as computing so many."""
BATCH_TOKENS = 8192
"""Prompt tokens of one pass: prompts that wait share it up to here."""
STEP = 1 / 300
"""What a token in a block that is held costs each step: reading it takes that part of the time to compute one."""
STEP_TOKENS = 384.0
"""What a step of answers takes besides reading the cache: as long as computing so many prompt tokens."""

ALIKE = 0.2
"""Ranks whose times differ by less than this, as a logarithm, count as equal."""
EXPONENT = 0.5
"""What of a difference counts. By all of it answers come sooner still, and the last first tokens later: those who are
sent to a fast rank wait for others who were."""
MOST_SLOWNESS = 2.0
"""As a logarithm, up or down."""
MOST_PS = 10**13
"""A rate above this, of ten seconds, is no rate of an engine."""
NEAR = 2.0
"""A cost that is less than so many times the usual one, and more than that part of it, is the usual one: a line through
the times of an engine may be as far off, and depends on the prompts that came."""
FAR = 16.0
"""A cost is at most so many times the usual one, or that part of it."""


@frozen
class EngineCosts:
    """What engines take, in the time to compute one prompt token."""

    pass_tokens: float = PASS_TOKENS
    """A pass, besides its prompt tokens."""
    batch_tokens: int = BATCH_TOKENS
    """Prompt tokens of one pass, at most."""
    step: float = STEP
    """Reading a token in the cache."""
    step_tokens: float = STEP_TOKENS
    """A step of answers, besides reading the cache."""
    seats: int | None = None
    """Requests that a rank runs at a time, further ones wait; None: not known of every worker."""


USUAL = EngineCosts()


@define(eq=False)
class ReportedRates:
    """The last report of each rank, and the limits in the cards. For one loop."""

    _reports: dict[WorkerRank, tuple[float, PassRates]] = field(factory=dict, init=False)
    """Behind the time when it came."""
    _refused: set[WorkerRank] = field(factory=set, init=False)
    _limits: EngineCosts = field(default=USUAL, init=False)

    def take_in(self, rank: WorkerRank, rates: PassRates, now_s: float) -> None:
        """Note a report that came now. One with a number that no engine has is not noted, and logged, once for a rank.

        A rate of 0 for a prompt token or a step counts as none.
        """
        if any(rate is not None and rate > MOST_PS for rate in astuple(rates)):
            if rank not in self._refused:
                self._refused.add(rank)
                _log.warning("worker %x, rank %d, reports what no pass takes: %s", rank.worker_id, rank.dp_rank, rates)
        elif (known := self._reports.get(rank)) is None or known[1] != rates:
            self._reports[rank] = now_s, rates

    def forget(self, worker_id: int) -> None:
        """Forget the ranks of a worker."""
        self._reports = {rank: report for rank, report in self._reports.items() if rank.worker_id != worker_id}
        self._refused = {rank for rank in self._refused if rank.worker_id != worker_id}

    def set_limits(self, cards: Iterable[ModelRuntimeConfig]) -> None:
        """Take the limits of the workers that are there."""
        cards = list(cards)
        tokens = sorted(card.max_num_batched_tokens for card in cards if card.max_num_batched_tokens)
        seats = [card.max_num_seqs for card in cards]
        self._limits = EngineCosts(
            batch_tokens=tokens[len(tokens) // 2] if tokens else BATCH_TOKENS,
            seats=max(filter(None, seats)) if seats and all(seats) else None,
        )

    def known(self, now_s: float) -> Mapping[WorkerRank, PassRates]:
        """Return the reports from before now. Whatever else happens now may come before or after those of now."""
        return {rank: rates for rank, (at_s, rates) in self._reports.items() if at_s < now_s}

    def costs(self, known: Mapping[WorkerRank, PassRates]) -> EngineCosts:
        """Return what engines take by these reports and the cards; what is not reported has its default.

        So has a pass that seems to take less: times that grow faster the longer prompts are make it seem so.
        """
        limits = self._limits
        return EngineCosts(
            max(PASS_TOKENS, _middle(known.values(), lambda rates: rates.pass_ps, PASS_TOKENS)),
            limits.batch_tokens,
            _middle(known.values(), lambda rates: rates.held_token_ps, STEP),
            _middle(known.values(), lambda rates: rates.step_ps, STEP_TOKENS),
            limits.seats,
        )


def _middle(reports: Iterable[PassRates], cost: Callable[[PassRates], int | None], usual: float) -> float:
    """Return the median of a cost in prompt tokens; the usual one where it is near, or nobody reports it."""
    found = [
        own / rates.prompt_token_ps for rates in reports if rates.prompt_token_ps and (own := cost(rates)) is not None
    ]
    middle = median(found) if found else usual
    return usual if usual / NEAR < middle < usual * NEAR else min(usual * FAR, max(usual / FAR, middle))


def slowness(known: Mapping[WorkerRank, PassRates], new_tokens: float) -> dict[WorkerRank, float]:
    """Return what each rank counts as slower than the one in the middle, by a prompt with so many new tokens.

    Of ranks that compute no prompts the step of answers counts. Ranks that count as equal have the same.
    """
    times = {
        rank: rates.pass_ps + rates.prompt_token_ps * new_tokens
        for rank, rates in known.items()
        if rates.pass_ps is not None and rates.prompt_token_ps
    } or {rank: float(rates.step_ps) for rank, rates in known.items() if rates.step_ps}
    logs = sorted((log(time), rank) for rank, time in times.items())
    groups = list[list[tuple[float, WorkerRank]]]()
    for one in logs:
        if groups and one[0] - groups[-1][0][0] < ALIKE:
            groups[-1].append(one)
        else:
            groups.append([one])
    means = {rank: fsum(off for off, _ in group) / len(group) for group in groups for _, rank in group}
    middle = median(means.values()) if means else 0.0
    return {
        rank: exp(min(MOST_SLOWNESS, max(-MOST_SLOWNESS, EXPONENT * (mean - middle)))) for rank, mean in means.items()
    }


def rate_reports(events: EventPlane, endpoint: str | EndpointId) -> Observable[RankRates]:
    """Return what the workers of the endpoint's component report of their passes; `KvRouter.follow_rates` takes it."""
    where = EndpointId.parse(endpoint)
    reports = events.subscribe(Scope(where.namespace, where.component), KV_RATES_TOPIC, RankRates)
    return reports.pipe(ops.map(attrgetter("payload")))
