"""Block hashes against values of the original library."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from pipeline.llm import SEED, block_hashes, hash_seed, sequence_hashes

KNOWN = [
    ([1, 2, 3, 4], 4, [14643705804678351452], [14643705804678351452]),
    (
        list(range(1, 13)),
        4,
        [14643705804678351452, 16777012769546811212, 483935686894639516],
        [14643705804678351452, 4945711292740353085, 12583592247330656132],
    ),
    (list(range(32)), 16, [15310707395893867146, 15292316782987903195], [15310707395893867146, 13769157705258532664]),
    (list(range(10)), 4, [9143094415614847814, 12124091508212882195], [9143094415614847814, 9510318385840434533]),
    ([2**32 - 1] * 4, 4, [12410542959481710713], [12410542959481710713]),
    (list(range(128)), 64, [3480597578098033343, 3318286205056455972], [3480597578098033343, 2575318956255022795]),
    ([1, 2, 3], 4, [], []),
]


@pytest.mark.parametrize(("tokens", "block_size", "local", "chained"), KNOWN)
def test_hashes_are_those_of_the_original(
    tokens: list[int], block_size: int, local: list[int], chained: list[int]
) -> None:
    assert block_hashes(tokens, block_size) == local
    assert sequence_hashes(local) == chained


@given(st.lists(st.integers(0, 2**64 - 1), max_size=8), st.integers(0, 8))
def test_chaining_in_pieces_equals_chaining_whole(local: list[int], cut: int) -> None:
    first = sequence_hashes(local[:cut])
    rest = sequence_hashes(local[cut:], first[-1] if first else None)
    assert first + rest == sequence_hashes(local)


@pytest.mark.parametrize("token", [-1, 2**32, "a", None])
def test_a_token_that_is_no_u32_is_refused(token: object) -> None:
    with pytest.raises(InvalidArgument):
        block_hashes([1, token], 1)  # type: ignore[list-item]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8))
def test_an_array_has_the_hashes_of_its_list(tokens: list[int], block_size: int) -> None:
    for typecode in "ILQ":
        assert block_hashes(array(typecode, tokens), block_size) == block_hashes(tokens, block_size)


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(InvalidArgument) as refused:
        block_hashes([1], 0)
    assert refused.value.field == "block_size"


@pytest.mark.parametrize(
    ("lora", "namespace", "seed"),
    [
        (None, None, SEED),
        ("", "", SEED),
        ("adapter-a", None, 8842669519798868182),
        (None, "tenant-a", 1948188790972764086),
        ("adapter-a", "tenant-a", 10790858310771630931),
    ],
)
def test_adapter_and_namespace_change_the_seed(lora: str | None, namespace: str | None, seed: int) -> None:
    assert hash_seed(lora, namespace) == seed


def test_an_adapters_blocks_have_other_hashes() -> None:
    assert block_hashes([0, 1, 2, 3], 4, seed=hash_seed("adapter-a")) == [6665157333201000639]
    assert block_hashes([0] * 16, 16, seed=hash_seed("日本語")) == [17931561296237394351]


def test_a_prompt_that_is_hashed_in_pieces_has_the_hashes_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, sizes = list(range(1000)), (1, 3, 16, 64, 999, 1000, 1001)
    whole = [block_hashes(tokens, size) for size in sizes]
    for at_once in (1, 7, 64, 100):
        monkeypatch.setattr("pipeline.llm.block_hash._AT_ONCE_TOKENS", at_once)
        assert [block_hashes(tokens, size) for size in sizes] == whole
