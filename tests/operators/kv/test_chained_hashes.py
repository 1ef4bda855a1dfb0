"""LazySequenceHashes: the same hashes as the whole list, read no further than somebody asks."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import prompt as chained_hashes
from operators.kv.load import ActiveSequences, SequenceLoad
from operators.kv.prompt import LazySequenceHashes
from operators.kv.types import WorkerRank
from pipeline.llm import sequence_hashes


@given(st.lists(st.integers(0, 2**64 - 1), max_size=70))
def test_they_read_like_the_whole_chain(local: list[int]) -> None:
    chained, whole = LazySequenceHashes(array("Q", local)), sequence_hashes(local)
    assert list(chained) == list(chained) == whole
    assert (len(chained), [chained[at] for at in range(len(chained))]) == (len(whole), whole)
    assert (chained[1:-1], chained[-1:]) == (whole[1:-1], whole[-1:])


def test_there_is_none_behind_the_last() -> None:
    with pytest.raises(IndexError):
        LazySequenceHashes([1, 2])[2]


def test_a_projection_chains_no_further_than_some_rank_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    local, rank, chained_blocks = list(range(1, 1001)), WorkerRank(0), list[int]()
    sequences = ActiveSequences()
    sequences.set_workers({0: range(1)})
    sequences.book("r", rank, SequenceLoad(sequence_hashes(local[:40])), 0.0)

    def counted(local_hashes: list[int], parent: int | None) -> list[int]:
        chained_blocks.append(len(local_hashes))
        return sequence_hashes(local_hashes, parent)

    monkeypatch.setattr(chained_hashes, "sequence_hashes", counted)
    assert list(sequences.project(LazySequenceHashes(local), (rank,), 0.0).additional_blocks) == [960]
    assert 40 < sum(chained_blocks) < 80
