"""The course of the conformance kit: what a started engine is asked, in which order, and what is left out.

    alone ──► the same again ──► at the same time ──► with limits ──► closed, stopped, killed ──► hosted

What would only fail again for a reason that was found is left out.
"""

from __future__ import annotations

from functools import partial

from attrs import evolve, frozen

from pipeline.protocols import PreprocessedRequest

from .answer import Trial
from .blocked import check_loop, check_loop_since
from .checks import (
    CONCURRENT,
    check_alone,
    check_bad,
    check_concurrent,
    check_kv_event_sources,
    check_model,
    check_nothing_left_over,
    check_paused_reader,
    check_same,
    check_setup_metrics,
    learn_beginning,
    learn_others,
    shortened,
)
from .endings import check_cancelled_reader, check_close, check_kill, check_neighbours
from .failure import AFTERWARDS, ConformanceFailure, Found
from .held import CANCEL_SCOPE, LOCK, TASK_GROUP
from .hosted import check_hosted
from .known import Known
from .left import Rest, check_left_by_close, check_left_by_stop
from .limits import check_choices, check_ignore_eos, check_max_tokens, check_min_tokens
from .stops import check_stop_before, check_stop_between, check_stop_in_wait

_WAITS = ((0, True), (0, False), (1, True), (1, False), (2, True))
"""Behind how many chunks a wait is disturbed, and whether in its middle or at its beginning."""
_LAST = {"GenerateFailed", "LoopBlocked", LOCK, CANCEL_SCOPE, TASK_GROUP}
"""After these of the first answer no more is asked: every further check would find them again, and take as long."""
_OF_THE_CONFIG = {
    *("EmptyModelInConfig", "KvEventSourcesFailed", "KvEventSourcesNotIdempotent", "BadRequestServed"),
    *("SetupMetricsFailed", "ComponentMetricsNotIdempotent"),
}
"""After these the rules of AsyncEngine are checked, too; what fails them otherwise has failed before."""


async def check_started(trial: Trial, found: Found, bad_request: PreprocessedRequest | None, *, varies: bool) -> None:
    """Check a started engine. With `varies` it is also asked other prompts than that of the trial."""
    await found.note_each(
        partial(check_model, trial.config),
        partial(check_kv_event_sources, trial.engine, trial.within_s),
        partial(check_setup_metrics, trial.engine, trial.within_s),
    )
    if bad_request is not None:
        await found.note(check_bad(trial, bad_request))
    rest = await Rest.of(trial)
    trial.turns.clear()
    known, alone = await _alone(trial, found)
    if not found.failures.keys().isdisjoint(_LAST):
        return
    course = _Course(found, known, alone, rest)
    if alone is None:
        trial = await course.again(trial, varies=varies)
    together = "TokensLeftOver" not in found and await found.note_each(  # they would be in these, too
        partial(check_concurrent, trial, known, alone),
        partial(check_paused_reader, trial, alone),
    )
    if alone is None:
        trial = await course.limit(trial)
    await found.note_each(partial(check_loop_since, trial))
    await course.disturb(trial, together=together)
    if found.failures.keys() <= _OF_THE_CONFIG:
        for failure in await check_hosted(trial, known, None if "BadRequestServed" in found else bad_request):
            found.add(failure)
    await found.note_each(partial(check_loop_since, trial))


async def _alone(trial: Trial, found: Found) -> tuple[Known, ConformanceFailure | None]:
    """One request; returns what is known then, and what it failed with."""
    try:
        known, alone = await check_alone(trial), None
    except ConformanceFailure as failure:
        known, alone = Known.nothing(), failure
        found.add(failure)
    if alone is None or alone.name not in _LAST:
        await found.note_each(partial(check_loop, trial, known.natural.length or 1), but=alone)
    return known, alone


@frozen
class _Course:
    """What is behind the first request, which failed with `alone` or not. The engine was at rest before."""

    found: Found
    known: Known
    alone: ConformanceFailure | None
    rest: Rest

    async def again(self, trial: Trial, *, varies: bool) -> Trial:
        """The same and other requests, one at a time; returns how to ask from here on."""
        trial = await self.found.note(shortened(trial, self.known)) or trial
        await self.found.note_each(partial(check_same, trial, self.known))
        await learn_others(trial, self.known, varies=varies)
        await self.found.note_each(partial(check_nothing_left_over, trial, self.known, "behind a short one"))
        return trial

    async def limit(self, trial: Trial) -> Trial:
        """Requests with limits; returns how to ask from here on."""
        found, known = self.found, self.known
        await found.note_each(
            partial(check_max_tokens, trial, known),
            partial(check_nothing_left_over, trial, known, "behind a limited one"),
        )
        if "TokensLeftOver" in found:
            return trial  # they would be in all that follow
        await found.note_each(
            partial(check_min_tokens, trial, known),
            partial(check_ignore_eos, trial, known),
            partial(check_choices, trial, known),
            partial(check_nothing_left_over, trial, known, "behind others with limits"),
        )
        trial = evolve(trial, goes_on=known.goes_on)
        await found.note_each(partial(learn_beginning, trial, known))
        return trial

    async def disturb(self, trial: Trial, *, together: bool) -> None:
        """Requests that are closed, stopped or killed, and others behind and beside them."""
        found, known, alone = self.found, self.known, self.alone
        left_by_close = partial(check_left_by_close, trial, self.rest, known.gap_s)
        left_by_stop = partial(check_left_by_stop, trial, self.rest, known.gap_s)
        leaves_nothing = await found.note_behind(left_by_close)
        went_well = await self._stop(trial) and leaves_nothing
        await found.note_each(partial(check_loop_since, trial))
        went_well &= await found.note_behind(
            partial(self._nothing_left_over, trial, "behind stopped ones"),
            partial(check_close, trial, CONCURRENT if together else 1),
            partial(check_loop_since, trial),
        )
        if "CloseFailed" not in found:  # what is killed is closed, too
            went_well &= await found.note_behind(
                partial(self._nothing_left_over, trial, "behind closed ones"),
                partial(check_kill, trial),
                partial(self._nothing_left_over, trial, "behind killed ones"),
                partial(check_cancelled_reader, trial),
                *([left_by_stop] if leaves_nothing else []),
            )
        if (
            went_well
            and together
            and await found.note_each(partial(check_concurrent, trial, known, alone, name=AFTERWARDS))
        ):
            await found.note_each(partial(check_neighbours, trial, known, alone))

    async def _nothing_left_over(self, trial: Trial, after: str) -> None:
        if self.alone is None:  # else the request fails behind others, too
            await check_nothing_left_over(trial, self.known, after)

    async def _stop(self, trial: Trial) -> bool:
        """Whether stops at all moments go well. What fails without a wait is not tried in one."""
        return await self.found.note_behind(
            partial(check_stop_before, trial, self.known),
            partial(check_stop_between, trial, self.known),
            but=self.alone,
        ) and await self.found.note_behind(
            *(partial(check_stop_in_wait, trial, self.known, behind, timed=timed) for behind, timed in _WAITS),
            but=self.alone,
        )
