"""The tensors of the torch engine alone: KV as bytes, and draws from logits."""

from __future__ import annotations

from typing import Any

import pytest

from engines.torch import Sampling
from pipeline import InvalidArgument

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(params=["float32", "bfloat16"])
def store(request: pytest.FixtureRequest, torch: Any) -> Any:
    """A store of ten blocks of four tokens, filled at random."""
    from engines.torch.kv_store import KvLayout, KvStore

    made = KvStore(KvLayout(3, 2, 5, request.param, 4 if request.param == "float32" else 2), 10, 4, "cpu")
    made.cells.copy_(torch.rand(made.cells.shape))
    return made


def test_kv_is_read_in_the_order_of_the_layout(store: Any, torch: Any) -> None:
    data = store.read([7, 2, 5], 9)
    assert len(data) == 9 * store.layout.bytes_per_token
    found = torch.frombuffer(bytearray(data), dtype=store.cells.dtype).view(3, 2, 9, 10)
    places = [28, 29, 30, 31, 8, 9, 10, 11, 20]
    assert torch.equal(found, store.cells[:, :, places])


def test_kv_that_was_read_can_be_written_elsewhere_and_nothing_else_changes(store: Any, torch: Any) -> None:
    data, before = store.read([7, 2, 5], 9), store.cells.clone()
    store.write([0, 1, 3], 9, data)
    assert store.read([0, 1, 3], 9) == data
    changed = [0, 1, 2, 3, 4, 5, 6, 7, 12]
    others = [place for place in range(44) if place not in changed]
    assert torch.equal(store.cells[:, :, others], before[:, :, others])


def test_kv_is_written_from_a_token_on(store: Any, torch: Any) -> None:
    data, before = store.read([7, 2], 8), store.cells.clone()
    store.write([0, 1], 8, data, start=4)
    assert torch.equal(store.cells[:, :, :4], before[:, :, :4])
    assert torch.equal(store.cells[:, :, 4:8], before[:, :, 8:12])


@pytest.mark.parametrize(("blocks", "tokens", "cut"), [([0, 1], 8, 1), ([0, 1], 8, -1), ([0], 5, 0)])
def test_kv_of_the_wrong_size_is_refused_and_nothing_written(
    store: Any, torch: Any, blocks: list[int], tokens: int, cut: int
) -> None:
    before, size = store.cells.clone(), tokens * store.layout.bytes_per_token
    with pytest.raises(InvalidArgument):
        store.write(blocks, tokens, bytes(size + cut))
    assert torch.equal(store.cells, before)


SHARES = [0.1, 0.4, 0.2, 0.3]


def draws(torch: Any, **options: Any) -> list[int]:
    """Return what a thousand even draws from `SHARES` give."""
    from engines.torch.drawing import sampled

    logits, chosen = torch.tensor(SHARES).log(), dict[str, Any](temperature=1.0) | options
    return [sampled(logits, Sampling(**chosen), (n + 0.5) / 1000) for n in range(1000)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SHARES),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 99}, SHARES),
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.0}, [0, 1, 0, 0]),
        ({"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 0.45}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_draws_have_the_shares_of_their_tokens(torch: Any, options: dict[str, Any], expected: list[float]) -> None:
    found = draws(torch, **options)
    assert [found.count(token) / 1000 for token in range(4)] == pytest.approx(expected, abs=0.002)


def test_a_draw_next_to_one_gives_a_token_that_may_come(torch: Any) -> None:
    from engines.torch.drawing import sampled

    logits = torch.full((50_000,), float("-inf"))
    logits[:3] = 0.0
    assert sampled(logits, Sampling(temperature=1.0), 1 - 2**-53) == 2
    assert sampled(logits, Sampling(temperature=1.0), 0.0) == 0
