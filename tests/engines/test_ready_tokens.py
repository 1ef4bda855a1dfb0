"""ReadyTokens: what waits for a reader is one bundle for each choice, within its bounds; a lone token is alone."""

from __future__ import annotations

from array import array

import anyio
from hypothesis import given
from hypothesis import strategies as st

from engines.ready_tokens import BUNDLE_MAX_CANDIDATES, BUNDLE_MAX_TOKENS, ReadyTokens, bundle_max_tokens
from pipeline import EngineShutdown, InvalidArgument


async def test_tokens_that_wait_are_one_bundle() -> None:
    ready: ReadyTokens[str, int] = ReadyTokens()
    for token in range(3):
        ready.put("only", [token])
    ready.put("only", [3], "length")
    bundle = ready.take()
    assert (bundle.choice, bundle.tokens, bundle.end) == ("only", [0, 1, 2, 3], "length")
    assert not ready.waiting


async def test_a_token_behind_one_that_was_taken_is_another_bundle() -> None:
    ready: ReadyTokens[str, int] = ReadyTokens()
    ready.put("only", [1])
    first = ready.take()
    ready.put("only", [2])
    assert first.tokens == [1]
    assert ready.take().tokens == [2]


async def test_a_lone_token_wakes_its_reader() -> None:
    ready: ReadyTokens[str, int] = ReadyTokens()
    found: list[list[int]] = []

    async def read() -> None:
        while len(found) < 2:
            if not ready.waiting:
                await ready.news.wait()
            found.append(ready.take().tokens)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        for token in range(2):
            await anyio.sleep(1)
            ready.put("only", [token])
    assert found == [[0], [1]]


async def test_an_ending_wakes_whoever_waits_for_it_behind_tokens_that_were_not_read() -> None:
    ready: ReadyTokens[str, int] = ReadyTokens()
    ready.put("only", [1])
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_wait, ready)
            await anyio.sleep(1)
            ready.put("only", [], True)


async def _wait(ready: ReadyTokens[str, int]) -> None:
    await ready.news.wait()


async def test_tokens_with_their_times_stay_as_they_are() -> None:
    ready: ReadyTokens[str, int] = ReadyTokens()
    ready.put("only", [1])
    ready.put("only", [2, 3], None, array("d", [0.1, 0.2]))
    ready.put("only", [4])
    ready.put("only", [5])
    assert [ready.take().tokens for _ in range(3)] == [[1], [2, 3], [4, 5]]


async def test_the_first_error_stays_and_wakes_the_reader() -> None:
    ready: ReadyTokens[str, int] = ReadyTokens()
    first = EngineShutdown("first")
    ready.fail(first)
    ready.fail(InvalidArgument("second"))
    assert ready.error is first


async def test_nothing_comes_behind_an_error() -> None:
    ready: ReadyTokens[str, int] = ReadyTokens()
    ready.put("only", [1])
    ready.fail(EngineShutdown("failed"))
    ready.put("only", [2])
    assert [bundle.tokens for bundle in ready.waiting] == [[1]]


async def test_a_lone_token_that_the_reader_waits_for_is_taken_if_it_is_offered() -> None:
    ready: ReadyTokens[str, int] = ReadyTokens()
    taken: list[int] = []

    def take(token: int) -> bool:
        if token < 90:
            taken.append(token)
        return token < 90

    ready.take_lone = take
    ready.put("only", [1], offers=True)
    assert (taken, ready.take().tokens) == ([], [1]), "nobody waits"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_wait, ready)
        await anyio.wait_all_tasks_blocked()
        ready.put("only", [2], offers=True)
        assert (taken, ready.taken) == ([2], 1)
        for tokens, end, offers in (([3], None, False), ([4, 5], None, True), ([6], "end", True), ([99], None, True)):
            ready.put("only", tokens, end, offers=offers)
            assert (taken, ready.take().tokens) == ([2], tokens)
            tasks.start_soon(_wait, ready)
            await anyio.wait_all_tasks_blocked()
        ready.news.wake()


def test_candidates_bound_a_bundle() -> None:
    assert bundle_max_tokens() == bundle_max_tokens(1) == BUNDLE_MAX_TOKENS
    assert bundle_max_tokens(21) == BUNDLE_MAX_CANDIDATES // 21
    assert bundle_max_tokens(100_000) == 1


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.booleans()), max_size=60),
)
async def test_each_choice_gets_its_tokens_once_and_in_order(most: int, steps: list[tuple[int, int, bool]]) -> None:
    ready: ReadyTokens[int, int] = ReadyTokens(most)
    put: dict[int, list[int]] = {}
    taken: dict[int, list[int]] = {}
    sizes: list[int] = []

    def take() -> None:
        bundle = ready.take()
        taken.setdefault(bundle.choice, []).extend(bundle.tokens)
        sizes.append(len(bundle.tokens))

    for number, (choice, count, reads) in enumerate(steps):
        tokens = [100 * number + place for place in range(count)]
        put.setdefault(choice, []).extend(tokens)
        ready.put(choice, list(tokens))
        if reads:
            take()
    while ready.waiting:
        take()
    assert taken == put
    largest = max((count for _, count, _ in steps), default=0)
    assert max(sizes, default=0) <= max(most, largest)  # one that was put as it is stays
