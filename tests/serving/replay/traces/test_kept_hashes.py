"""The hashes that come with the prompts of a replay are those of their tokens, made once for all runs."""

from __future__ import annotations

from array import array

import pytest

from pipeline.llm import HashedTokens, LocalHashes, block_hash_array, block_hashes, sequence_hashes
from serving.replay.schedule import Schedule
from serving.replay.traces import KeptHashes, Prompt, Session, Trace, TraceFormat, Turn

IDS = array("I", [7, 0, 2**32 - 1, 7])


@pytest.mark.parametrize("tokens", [1, 63, 512, 1_000, 2_047, 2_048])
@pytest.mark.parametrize("block_size_tokens", [1, 7, 64, 100, 256, 512, 1_024, 4_096])
@pytest.mark.parametrize("seed", [1337, 5])
def test_hashes_of_a_prompt_are_those_of_its_tokens(tokens: int, block_size_tokens: int, seed: int) -> None:
    prompt = Prompt.of(IDS, 512, tokens)
    packed = prompt.packed()
    assert packed.tolist() == prompt.token_ids()
    local = block_hashes(prompt.token_ids(), block_size_tokens, seed=seed)
    found = block_hash_array(packed, block_size_tokens, seed=seed)
    assert isinstance(found, LocalHashes)
    assert found.tolist() == local == block_hashes(packed, block_size_tokens, seed=seed)
    for _ in range(2):
        assert sequence_hashes(found) == sequence_hashes(local)
    assert sequence_hashes(found, 3) == sequence_hashes(local, 3)


def test_other_hashes_than_of_plain_blocks_are_made_of_the_tokens() -> None:
    packed = Prompt.of(IDS, 512).packed()
    tokens = packed.tolist()
    assert block_hashes(packed, 64, is_eagle=True) == block_hashes(tokens, 64, is_eagle=True)
    assert block_hashes(packed, 64, media=[[9], None]) == block_hashes(tokens, 64, media=[[9], None])


def test_a_longer_prompt_does_not_have_the_hashes_of_the_one_it_begins_with() -> None:
    longer = Prompt.of(IDS, 512).packed() + array("I", [1] * 64)
    assert not isinstance(longer, HashedTokens)
    assert block_hashes(longer, 64) == block_hashes(longer.tolist(), 64)


def trace_of(*prompts: Prompt, format: TraceFormat = TraceFormat.MOONCAKE) -> Trace:
    turns = (Turn(f"line:{at}", at + 1, prompt, 4) for at, prompt in enumerate(prompts))
    return Trace(tuple(Session(turn.name, (turn,), arrival_ms=0.0) for turn in turns), format)


def packed_of(trace: Trace) -> list[array[int]]:
    return [due.packed() for due in Schedule.of(trace).take_due(0.0)]


def test_runs_of_a_trace_share_the_hashes_of_its_prompts() -> None:
    trace = trace_of(Prompt.of(IDS, 512), Prompt.of(IDS, 512))
    first, second = ([block_hash_array(one, 64) for one in packed_of(trace)] for _ in range(2))
    assert all(one is same for one, same in zip(first, second, strict=True))
    assert first[0] is not first[1]
    assert block_hash_array(packed_of(trace)[0], 32) is not first[0]
    assert block_hash_array(packed_of(trace)[0], 64, seed=5).tolist() != first[0].tolist()


def test_beyond_the_limit_hashes_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.replay.traces.hashes._LIMIT_BLOCKS", 40)
    kept, prompts = KeptHashes(), [Prompt.of(IDS, 512), Prompt.of(IDS[1:], 512)]
    first, second = ([block_hash_array(one.packed(kept), 64) for one in prompts] for _ in range(2))
    assert first[0] is second[0]
    assert first[1] is not second[1]
    assert first[1].tolist() == second[1].tolist() == block_hashes(prompts[1].token_ids(), 64)


def test_a_prompt_behind_a_history_is_hashed_as_a_whole() -> None:
    trace = trace_of(Prompt.of(IDS, 512), format=TraceFormat.MOONCAKE_DELTA)
    schedule = Schedule.of(trace)
    (due,) = schedule.take_due(0.0)
    assert block_hashes(due.packed(), 64) == block_hashes(due.token_ids(), 64)
