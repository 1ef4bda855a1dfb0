"""Checks of an engine beside its answers: its life cycle, what requests leave behind, and blocking turns (L11).

Each is a function that raises the ConformanceFailure it finds; `check_hosted` finds those of the rules of AsyncEngine
(E1 to E13) behind the adapter of a host. Source: dynamo lib/backend-common/src/testing.rs.

A turn may be long because the machine was busy, the collector ran or a module was loaded. So a first long turn is only
the reason to look again, and the shortest of several tries counts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import anyio
from anyio import create_task_group
from attrs import frozen

from pipeline import Annotated
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

from ..adapter import RequestAdapter
from ..llm import EngineConfig, GenerateContext, LLMEngine
from ..publishing import EngineMetrics, MetricsContext
from .answer_checks import answered, gathered
from .answers import Trial, limited
from .bounded_calls import bounded
from .failures import failed
from .inspection import LONG_S, Running, Turns
from .stop_checks import abort, not_observed, overrides_abort


async def check_left_by_close(trial: Trial) -> None:
    """A request that is closed. Raises TasksLeftByStream, ThreadsLeftByStream and WorkLeftByStream."""
    await _expect_nothing_left(trial, "closed", lambda context: None)


async def check_left_by_stop(trial: Trial) -> None:
    """Requests that are killed or stopped. Raises the same, or AbortIgnored if `abort` could have ended it."""
    await _expect_nothing_left(trial, "killed", lambda context: context.kill())
    await _expect_nothing_left(trial, "stopped", lambda context: context.stop())


async def _expect_nothing_left(trial: Trial, how: str, disturb: Callable[[GenerateContext], None]) -> None:
    before = Running.now()
    async with trial.answer(long=True, is_begun=True) as (answer, context):
        disturb(context)
        if context.is_stopped:
            await gathered([lambda: abort(trial, context)])  # what it raises is reported by another check
        if how == "stopped":
            await answer.drain(not_observed(trial), trial.deadline_s)
    tasks, threads = await before.left(trial.deadline_s, may_idle=True)
    may_be_abort = how != "closed" and overrides_abort(trial.engine)
    for name, left in (("TasksLeftByStream", tasks), ("ThreadsLeftByStream", threads)):
        if left:
            raise failed("AbortIgnored" if may_be_abort else name, f"{how}: {_named(left)}")
    if not await trial.rest.is_back(trial.turns, trial.gap_s, trial.deadline_s):
        raise failed("AbortIgnored" if may_be_abort else "WorkLeftByStream", f"{how}, {trial.deadline_s:g} s later")


async def check_left_by_cleanup(before: Running, within_s: float) -> None:
    """Raises TasksLeftByCleanup and ThreadsLeftByCleanup."""
    tasks, threads = await before.left(within_s, may_idle=False)
    for name, left in (("TasksLeftByCleanup", tasks), ("ThreadsLeftByCleanup", threads)):
        if left:
            raise failed(name, _named(left))


def _named(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first


_AT_ONCE_S = 0.25
"""A turn that long is a block by itself."""
_SURELY_S = 1.0
"""A turn that long need not be looked at more than twice: each look takes as long."""
_TRIES = 5
_SHARE = 0.75
"""Of the tokens, how many a long turn must come with."""


@frozen
class Look:
    """One answer: its tokens and the long turns beside it."""

    tokens: int
    long: tuple[float, ...]

    @classmethod
    def now(cls, turns: Turns, tokens: int) -> Look:
        """What was seen since the last look."""
        look = cls(tokens, tuple(turns.long))
        turns.clear()
        return look

    @property
    def longest_s(self) -> float:
        return max(self.long, default=0.0)

    @property
    def is_blocked(self) -> bool:
        return self.longest_s >= _AT_ONCE_S or len(self.long) >= max(1.0, _SHARE * self.tokens)


async def check_loop(trial: Trial) -> None:
    """Behind the first answer. Raises LoopBlocked."""
    tokens = trial.natural.length or 1
    looks = [Look.now(trial.turns, tokens)]
    while looks[-1].is_blocked:
        shortest = min(look.longest_s for look in looks)
        if len(looks) == (2 if shortest >= _SURELY_S else _TRIES):
            turns = min(len(look.long) for look in looks)
            detail = (
                f"{turns} turns of {LONG_S * 1000:g} ms or more at {tokens} tokens, the longest of {shortest:.3f} s"
            )
            raise failed("LoopBlocked", detail)
        answer = await answered(trial)
        looks.append(Look.now(trial.turns, answer.tokens))


async def check_loop_since(trial: Trial) -> None:
    """The turns since then, of requests that were disturbed. Raises LoopBlocked."""
    blocks = [seconds for seconds in trial.turns.long if seconds >= _AT_ONCE_S]
    if len(blocks) >= _TRIES:
        raise failed(
            "LoopBlocked", f"{len(blocks)} turns of {_AT_ONCE_S:g} s or more, the longest of {max(blocks):.3f} s"
        )


_LENGTH = 24
"""Of an answer: well more than may still come after a stop, where the engine ignores its end."""
_MOST_ABORTS = 1000
"""That may be due at the same time."""
_NEED_SAME = ("E7", "E10")
"""Rules that compare an answer with that of another run."""

Work = Callable[[], Coroutine[Any, Any, None]]


async def check_hosted(trial: Trial, bad_request: PreprocessedRequest | None) -> None:
    """Note what `check_engine` finds, each named by its rule."""
    from pipeline.testing import ENGINE_RULES, check_engine  # a tool of tests, which a worker does not need

    rules = [rule for rule in ENGINE_RULES if trial.is_steady or rule not in _NEED_SAME]
    request = _request(trial)
    send, receive = anyio.create_memory_object_stream[Work](_MOST_ABORTS)
    adapter = RequestAdapter(trial.engine, spawn=send.send_nowait)

    async def abort() -> None:
        # In one task, begun before: tasks of their own would be taken for ones left over.
        async for work in receive:
            await work()

    async with receive, create_task_group() as tasks:
        tasks.start_soon(abort)
        for rule in rules:
            begun_s = anyio.current_time()
            try:
                await check_engine(
                    lambda: adapter,
                    request=request,
                    bad_request=bad_request,
                    within_s=trial.deadline_s,
                    answer_within_s=trial.within_s,
                    settle_s=trial.deadline_s,
                    compared=_by_choice,
                    rules=[rule],
                )
            except ExceptionGroup as group:
                for each in group.exceptions:
                    trial.found.add(failed(rule, str(each), cause=each))
                if anyio.current_time() - begun_s >= trial.within_s:
                    break  # the others would take as long
        send.close()
        tasks.cancel_scope.cancel()


def _by_choice(items: list[Annotated[LLMEngineOutput]]) -> dict[int, tuple[list[int], list[Any]]]:
    """Return tokens and ends of each choice. A server that is busy puts more tokens into a chunk."""
    choices: dict[int, tuple[list[int], list[Any]]] = {}
    for item in items:
        output = item.data
        tokens, ends = choices.setdefault(0 if output is None else output.index or 0, ([], []))
        if output is not None:
            tokens += output.token_ids
        ends += [end for end in (item.error, output and output.finish_reason) if end is not None]
    return choices


def _request(trial: Trial) -> PreprocessedRequest:
    """One with well more items than may still come after a stop, if the engine serves that."""
    room = min(trial.long_tokens, trial.room(_LENGTH, trial.request))
    if trial.goes_on and min(room, trial.tokens_in(trial.within_s / 2)) >= _LENGTH:
        return limited(trial.request, ignore_eos=True, max_tokens=_LENGTH)
    return trial.request


async def start(engine: LLMEngine, within_s: float) -> EngineConfig:
    """Raises StartFailed."""
    config: Any = await bounded("StartFailed", "start", lambda: engine.start(0), within_s)
    if not isinstance(config, EngineConfig):
        raise failed("StartFailed", f"it gave {type(config).__name__}")
    return config


async def check_model(trial: Trial) -> None:
    """Raises EmptyModelInConfig."""
    if not trial.config.model:
        raise failed("EmptyModelInConfig")


async def check_kv_event_sources(trial: Trial) -> None:
    """Raises KvEventSourcesFailed and KvEventSourcesNotIdempotent."""

    async def ranks() -> list[int]:
        return [source.dp_rank for source in await trial.engine.kv_event_sources()]

    await _expect_stable(ranks, "KvEventSourcesFailed", "KvEventSourcesNotIdempotent", trial.within_s)


async def check_setup_metrics(trial: Trial) -> None:
    """Raises SetupMetricsFailed and ComponentMetricsNotIdempotent."""
    context = MetricsContext("test-model", "test", 0.0, EngineMetrics())

    async def ranks() -> list[int]:
        return list((await trial.engine.setup_metrics(context)).dp_ranks)

    await _expect_stable(ranks, "SetupMetricsFailed", "ComponentMetricsNotIdempotent", trial.within_s)


async def _expect_stable(call: Callable[[], Awaitable[list[int]]], fails: str, changes: str, within_s: float) -> None:
    first = await bounded(fails, "the first call", call, within_s)
    if len(set(first)) < len(first):
        raise failed(fails, f"the ranks are {first}")
    if (second := await bounded(fails, "the second call", call, within_s)) != first:
        raise failed(changes, f"first {first}, then {second}")


async def drain(engine: LLMEngine, within_s: float) -> None:
    """Raises DrainFailed."""
    await bounded("DrainFailed", "drain", engine.drain, within_s)


async def clean_up(name: str, engine: LLMEngine, within_s: float) -> None:
    """Raises the failure of that name. Also runs where the kit itself is being cancelled."""
    await bounded(name, "cleanup", engine.cleanup, within_s, shield=True)
