"""The tensors of the torch engine alone: KV as bytes, and draws from logits."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from engines.torch import Choice, Drawn, Limits, Order, Sampling
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


def test_tokens_of_equal_probability_are_kept_up_to_the_share_and_no_further(torch: Any) -> None:
    from engines.torch.drawing import sampled

    kept = Sampling(temperature=1.0, top_p=0.5)
    assert len({sampled(torch.zeros(4), kept, (n + 0.5) / 100) for n in range(100)}) == 2


LOGITS = [-0.5, 0.9, 1.0]


def next_of(
    torch: Any,
    prompt: list[int],
    answer: list[int],
    logits: list[float] = LOGITS,
    *,
    min_tokens: int = 0,
    **options: Any,
) -> Drawn:
    """Return what is drawn from these logits behind a prompt and its answer so far; token 2 ends a sequence."""
    from engines.torch.drawing import draw

    limits = Limits(max_tokens=99, min_tokens=min_tokens, eos_token_ids=frozenset({2}))
    order = Order(prompt=prompt, choices=1, sampling=Sampling(**options), limits=limits, hash_seed=0)
    choice = Choice(order=order, index=0, receive=lambda _: None)
    choice.tokens += answer
    other = Choice(order=evolve(order, sampling=Sampling()), index=0, receive=lambda _: None)
    other.tokens += [0] * 9
    first, drawn = draw(torch.tensor([[5.0, 0.0, 0.0], logits]), [other, choice])
    assert first.token_id == 0
    return drawn


@pytest.mark.parametrize(
    ("prompt", "answer", "options", "token"),
    [
        ([0], [], {}, 2),
        ([0], [2], {"presence_penalty": 0.06}, 2),
        ([0], [2, 2], {"presence_penalty": 0.06}, 2),
        ([0], [2], {"presence_penalty": 0.2}, 1),
        ([0], [2], {"frequency_penalty": 0.06}, 2),
        ([0], [2, 2], {"frequency_penalty": 0.06}, 1),
        ([0], [1], {"frequency_penalty": -0.2}, 1),
        ([2, 2, 2], [], {"frequency_penalty": 1.0, "presence_penalty": 1.0}, 2),
        ([2], [], {"repetition_penalty": 1.2}, 1),
        ([0], [2], {"repetition_penalty": 1.2}, 1),
        ([2], [2, 2], {"repetition_penalty": 1.05}, 2),
    ],
)
def test_penalties_count_what_they_are_said_to(
    torch: Any, prompt: list[int], answer: list[int], options: dict[str, Any], token: int
) -> None:
    assert next_of(torch, prompt, answer, **options).token_id == token


def test_a_repetition_penalty_lowers_negative_logits_too(torch: Any) -> None:
    assert next_of(torch, [1], [], [-1.0, -0.9, -5.0], repetition_penalty=1.5).token_id == 0


def test_log_probabilities_are_those_before_penalties_and_ids_that_may_not_come(torch: Any) -> None:
    plain = torch.log_softmax(torch.tensor(LOGITS), -1).tolist()
    given: list[dict[str, Any]] = [{"presence_penalty": 0.2}, {"min_tokens": 5}]
    for options in given:
        drawn = next_of(torch, [0], [2], logprobs=2, **options)
        assert (drawn.token_id, drawn.rank) == (1, 2)
        assert drawn.logprob == pytest.approx(plain[1])
        assert [token_id for token_id, _ in drawn.top] == [2, 1]
        assert [logprob for _, logprob in drawn.top] == pytest.approx([plain[2], plain[1]])
    alone = next_of(torch, [0], [], logprobs=0)
    assert (alone.token_id, alone.rank, alone.top) == (2, 1, ())


def test_more_log_probabilities_than_tokens_are_all_of_them(torch: Any) -> None:
    assert len(next_of(torch, [0], [], logprobs=50).top) == 3


def test_an_end_is_not_drawn_before_its_time(torch: Any) -> None:
    assert [next_of(torch, [0], [0] * n, min_tokens=2).token_id for n in range(3)] == [1, 2, 2]
    assert next_of(torch, [0], [], min_tokens=2, temperature=1.0, top_k=1).token_id == 1


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logprobs": 3}])
def test_ids_beyond_the_vocabulary_end_nothing_and_harm_nothing(torch: Any, options: dict[str, Any]) -> None:
    from engines.torch.drawing import draw

    limits = Limits(max_tokens=9, min_tokens=9, stop_token_ids=frozenset({1, 2, 70_000}))
    order = Order(prompt=[0], choices=1, sampling=Sampling(**options), limits=limits, hash_seed=0)
    choice = Choice(order=order, index=0, receive=lambda _: None)
    assert draw(torch.tensor([LOGITS]), [choice])[0].token_id == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2e-5, "top_p": 1e-9},
        {"temperature": 1e300},
        {"temperature": 1.0, "top_k": 2**31 - 1, "min_p": 1.0},
        {"temperature": 1.0, "repetition_penalty": 1e-300},
        {"temperature": 1.0, "repetition_penalty": 1e300, "top_p": 0.5},
        {"repetition_penalty": 1e-300},
    ],
)
def test_options_at_the_ends_of_their_ranges_draw_a_token(torch: Any, options: dict[str, Any]) -> None:
    assert next_of(torch, [0, 1], [2], [-0.5, 0.0, 1.0], **options).token_id in range(3)
