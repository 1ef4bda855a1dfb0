"""Cutting a text: the tokens of the pieces, joined, are those of the whole, whatever the tokenizer splits by."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from operators import ByteTokenizer, HuggingFaceTokenizer
from operators.text import text_cuts
from operators.text.text_cuts import UnknownPattern, passes, separates
from pipeline import InvalidArgument

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u0800-\u4e00]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
BYTE_LEVEL = {"add_prefix_space": False, "use_regex": False}

SPLITS: dict[str, list[Any]] = {
    "llama3": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(**BYTE_LEVEL)],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(**BYTE_LEVEL)],
    "o200k": [pre_tokenizers.Split(Regex(O200K), "removed", invert=True), pre_tokenizers.ByteLevel(**BYTE_LEVEL)],
    "deepseek": [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK),
        pre_tokenizers.ByteLevel(**BYTE_LEVEL),
    ],
    "gpt2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt2-prefix": [pre_tokenizers.ByteLevel(add_prefix_space=True)],
}
WORDS = [
    "the quick brown fox",
    "don't I'LL we've",
    "x = 12345;  // 3.14\n\n",
    "日本語、한국어 «naïve» café",
    "a b  c   d\t\te",
]
PARTS = st.sampled_from(
    ["a", "b", "the", " ", "  ", "\n", "\r\n", "\t", "1", "23", "'", "'s", "'LL", ".", ",", "//", "é", "e\u0301", "日",
     "、", "本", "한", "\u0301", "\u017f", "\u212a", "K", "\u1e9e", "\u00a0", "\u3000", "\x1c", "🙂", "٣", "²", "Ǆ",
     "<|end|>", "<tool call>", "[pad]", "word",
     ", word", "x, word y", "pad", "pad "]
)  # fmt: skip
TEXTS = st.lists(PARTS, min_size=1, max_size=40).map("".join)


def made(name: str) -> HuggingFaceTokenizer:
    """A small byte-level BPE that splits as the model of this name does, with added tokens of all kinds."""
    tokenizer = Tokenizer(models.BPE())
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[name])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    tokenizer.add_tokens([
        AddedToken("<tool call>", normalized=False),
        AddedToken("[pad]", rstrip=True, lstrip=True, normalized=False),
        AddedToken("pad", rstrip=True, normalized=name == "qwen2"),
        AddedToken(", word", single_word=True, normalized=False),
    ])  # fmt: skip
    return HuggingFaceTokenizer(tokenizer)


TOKENIZERS = {name: made(name) for name in SPLITS}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cuts, "PIECE_CHARACTERS", 4)
    monkeypatch.setattr(text_cuts, "_WINDOW_CHARACTERS", 3)


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=4 * settings().max_examples)
@given(text=TEXTS)
@example(text="ab, cd'LL  12 345\n\n x\r\n日本、日本 it's a  <tool call> b [pad]  c x word y" * 3)
def test_the_tokens_of_the_pieces_are_those_of_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    pieces = list(tokenizer.pieces(text))
    event("cut" if len(pieces) > 1 else "whole")
    assert "".join(pieces) == text
    assert [token_id for piece in pieces for token_id in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.parametrize("name", SPLITS)
def test_plain_text_has_a_place_to_cut_in_every_few_words(name: str) -> None:
    pieces = list(TOKENIZERS[name].pieces("the quick brown fox jumps over it " * 20))
    assert max(map(len, pieces)) <= 8


def test_without_a_place_to_cut_a_piece_is_as_long_as_it_must_be() -> None:
    tokenizer = TOKENIZERS["llama3"]
    assert list(tokenizer.pieces("ab " + "c" * 20 + " de fg")) == ["ab", " " + "c" * 20, " de", " fg"]
    assert list(tokenizer.pieces(" " * 30)) == [" " * 30]


@pytest.mark.parametrize("text", ["ab " + "c" * 21, "  " * 11, "1" * 21, "日" * 40 + ", ok"])
def test_a_run_that_is_too_long_is_refused_with_its_limit(text: str) -> None:
    with pytest.raises(InvalidArgument, match="20 characters in a row") as caught:
        list(TOKENIZERS["llama3"].pieces(text, 20))
    exceeded = caught.value.exceeded
    assert exceeded is not None
    assert (exceeded.name, exceeded.value, exceeded.threshold) == ("max_unbroken_characters", 21, 20)
    assert "".join(TOKENIZERS["llama3"].pieces(text)) == text, "without a limit it passes"


@given(text=TEXTS)
def test_no_piece_is_longer_than_the_limit(text: str) -> None:
    try:
        pieces = list(TOKENIZERS["llama3"].pieces(text, 12))
    except InvalidArgument:
        return
    assert all(len(piece) <= 12 for piece in pieces)


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(r"(a|b)\b"), "isolated")},
        {"pre_tokenizer": pre_tokenizers.Split(Regex(LLAMA3), "merged_with_next")},
        {"normalizer": normalizers.Prepend("▁")},
        {"normalizer": normalizers.NFKC()},
    ],
)
def test_a_tokenizer_that_is_not_understood_has_one_piece_and_no_limit(change: dict[str, Any]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    for part, value in change.items():
        setattr(tokenizer, part, value)
    assert list(HuggingFaceTokenizer(tokenizer).pieces("a b " * 20, 10)) == ["a b " * 20]


@given(text=TEXTS)
def test_bytes_are_cut_anywhere(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert [i for piece in tokenizer.pieces(text) for i in tokenizer.encode(piece)] == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("pattern", "separating", "spanning"),
    [
        (LLAMA3, ["a ", "a\n", "a1", "1,", "日、"], ["  ", " a", "aa", "11", ",a", ",\n"]),
        (O200K, ["a ", "a1"], ["a'", "Aa", "A'"]),
        (r"a?+a|b", ["xb"], []),
        (r"x(?!\S)|\s+", [], ["x "]),
    ],
)
def test_pairs_are_judged_by_what_the_expression_can_do(
    pattern: str, separating: list[str], spanning: list[str]
) -> None:
    for pair in separating:
        assert separates(pattern, pair[0], pair[1])
    for pair in spanning:
        assert not separates(pattern, pair[0], pair[1])
        assert not passes(pattern, pair[0], pair[1])


@pytest.mark.parametrize(
    "pattern", [r"\w+", "a$", "(a)", "(?=a)", "(?<=a)b", r"[a[bc]]", r"[a&&b]", r"\p{Han}", "a*", "[a"]
)
def test_an_expression_that_is_not_understood_is_refused(pattern: str) -> None:
    with pytest.raises(UnknownPattern):
        separates(pattern, "a", " ")
