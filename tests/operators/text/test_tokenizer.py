"""Tokenizers, and the decoders they give: text token by token, whole characters only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from operators import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from operators.text.decoding import REPLACEMENT
from pipeline import InvalidArgument
from pipeline.errors import CodecError

TEXTS = st.text(st.sampled_from("ab the日本é🙂 \n한"), max_size=20)
Steps = list[str]


def steps(tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, **options: bool) -> Steps:
    """The text of each step, then of the flush."""
    decoder = tokenizer.decoder(prompt or (), **options)
    return [*(decoder.step(token_id) for token_id in token_ids), decoder.flush()]


def ids_of(tokenizer: HuggingFaceTokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer.token_id(token) for token in tokens]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


def as_bytes(tokenizer: HuggingFaceTokenizer, data: bytes) -> list[int]:
    return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in data))


@pytest.fixture(params=["bytes", "byte_level"])
def joining(request: pytest.FixtureRequest, byte_level: HuggingFaceTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else byte_level


@given(text=TEXTS)
def test_steps_join_to_the_whole_text(joining: Tokenizer, text: str) -> None:
    token_ids = joining.encode(text)
    assert "".join(steps(joining, token_ids)) == joining.decode(token_ids) == text


@given(text=TEXTS)
def test_a_split_character_is_never_shown_as_a_replacement(joining: Tokenizer, text: str) -> None:
    *shown, rest = steps(joining, joining.encode(text))
    assert REPLACEMENT not in "".join(shown)
    assert rest == ""


@given(data=st.binary(max_size=12))
def test_bytes_that_are_no_text_decode_as_they_would_at_once(data: bytes) -> None:
    assert "".join(steps(ByteTokenizer(), list(data))) == data.decode(errors="replace")


@given(text=TEXTS, cut=st.integers(0, 40))
def test_a_prompt_that_ends_inside_a_character_is_finished_by_the_answer(
    joining: Tokenizer, text: str, cut: int
) -> None:
    token_ids = joining.encode(text)
    prompt, answer = token_ids[:cut], token_ids[cut:]
    shown = "".join(steps(joining, answer, prompt))
    assert joining.decode(prompt).rstrip(REPLACEMENT) + shown == text


def test_an_unfinished_character_is_given_up_at_the_end(joining: Tokenizer) -> None:
    token_ids = joining.encode("a日")[:-1]
    assert steps(joining, token_ids)[-1] == REPLACEMENT
    decoder = joining.decoder()
    for token_id in token_ids:
        decoder.step(token_id)
    decoder.flush()
    assert decoder.flush() == ""
    assert "".join(map(decoder.step, joining.encode("日"))) == "日", "after a flush it starts anew"


@pytest.mark.parametrize("bad", [-1, 999_999, 2**40])
def test_an_id_that_is_no_token_is_a_decode_failure(
    joining: Tokenizer, word_pieces: HuggingFaceTokenizer, bad: int
) -> None:
    for tokenizer in (joining, word_pieces):
        with pytest.raises(CodecError, match=f"token id {bad} is not in the vocabulary"):
            tokenizer.decoder().step(bad)
        with pytest.raises(CodecError):
            tokenizer.decode([bad])


@given(token_ids=st.lists(st.integers(-2, 400) | st.sampled_from([2**31, 2**32, 2**40]), max_size=8))
def test_the_first_id_that_is_no_token_is_found(
    joining: Tokenizer, word_pieces: HuggingFaceTokenizer, token_ids: list[int]
) -> None:
    for tokenizer in (joining, word_pieces):
        found = tokenizer.first_unknown(token_ids)
        good = token_ids if found is None else token_ids[:found]
        tokenizer.decode(good)
        if found is not None:
            with pytest.raises(CodecError, match=f"token id {token_ids[found]} is not in the vocabulary"):
                tokenizer.decode([token_ids[found]])


def test_the_gaps_of_a_vocabulary_are_no_tokens() -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 5}, unk_token="a"))
    assert HuggingFaceTokenizer(made).first_unknown([0, 5, 3]) == 2
    assert HuggingFaceTokenizer(made).first_unknown([0, 5]) is None


def test_truncation_and_padding_of_the_file_are_off(byte_level_json: str, tmp_path: Path) -> None:
    """A prompt of ten words became five tokens, and padding was billed."""
    made = tokenizers.Tokenizer.from_str(byte_level_json)
    plain = made.encode("the quick brown fox jumps over the lazy dog", add_special_tokens=False).ids
    made.enable_truncation(max_length=5)
    made.enable_padding(length=64, pad_id=0)
    file = tmp_path / "tokenizer.json"
    file.write_text(made.to_str(), encoding="utf-8")
    held = json.loads(file.read_text(encoding="utf-8"))
    assert held["truncation"]
    assert held["padding"]
    tokenizer = HuggingFaceTokenizer.from_file(file)
    assert tokenizer.encode("the quick brown fox jumps over the lazy dog") == plain
    assert len(plain) > 5
    assert len(tokenizer.encode("a")) == 1


def test_unknown_ids_in_a_prompt_do_not_keep_the_answer_from_being_decoded(
    joining: Tokenizer, word_pieces: HuggingFaceTokenizer
) -> None:
    for tokenizer in (joining, word_pieces):
        answer = [tokenizer.encode("a")[0]]
        assert "".join(steps(tokenizer, answer, [999_999])) == "a"


def test_special_tokens_are_skipped_unless_wanted(byte_level: HuggingFaceTokenizer) -> None:
    for tokenizer, special in ((ByteTokenizer(), "<eos>"), (byte_level, "<|end|>")):
        token_id = tokenizer.token_id(special)
        assert token_id is not None
        token_ids = [*tokenizer.encode("a"), token_id, *tokenizer.encode("b")]
        assert "".join(steps(tokenizer, token_ids)) == tokenizer.decode(token_ids) == "ab"
        shown = "".join(steps(tokenizer, token_ids, skip_special_tokens=False))
        assert shown == tokenizer.decode(token_ids, skip_special_tokens=False) == f"a{special}b"


def test_special_tokens_written_in_a_text_become_one_id(byte_level: HuggingFaceTokenizer) -> None:
    assert byte_level.encode("<|end|>") == [byte_level.token_id("<|end|>")]
    assert ByteTokenizer().encode("<eos>") == list(b"<eos>")


def test_an_added_token_is_spelled_in_plain_text(byte_level: HuggingFaceTokenizer) -> None:
    token_ids = byte_level.encode("a<tool call>é")
    assert "".join(steps(byte_level, token_ids)) == "a<tool call>é"


def test_the_first_word_of_an_answer_keeps_its_space_behind_a_prompt(word_pieces: HuggingFaceTokenizer) -> None:
    hello, world, a = ids_of(word_pieces, "▁Hello", "▁world", "a")
    assert steps(word_pieces, [hello, world]) == ["Hello", " world", ""]
    assert steps(word_pieces, [hello, world], [a]) == [" Hello", " world", ""]


@given(text=st.text(st.sampled_from("é日🙂"), max_size=6), cut=st.integers(0, 12))
def test_characters_spelled_in_byte_tokens_are_held_until_whole(
    word_pieces: HuggingFaceTokenizer, text: str, cut: int
) -> None:
    (a,) = ids_of(word_pieces, "a")
    prompt_bytes, answer_bytes = text.encode()[:cut], text.encode()[cut:]
    *shown, rest = steps(word_pieces, as_bytes(word_pieces, answer_bytes), [a, *as_bytes(word_pieces, prompt_bytes)])
    whole_before = prompt_bytes.decode(errors="ignore")
    assert whole_before + "".join(shown) == (text if answer_bytes else whole_before)
    assert REPLACEMENT not in "".join(shown)
    assert not answer_bytes or rest == ""


def test_bytes_that_never_become_a_character_do_not_block_the_text(word_pieces: HuggingFaceTokenizer) -> None:
    (a,) = ids_of(word_pieces, "a")
    after_one = [*as_bytes(word_pieces, "日".encode()), *as_bytes(word_pieces, b"\xff"), a]
    assert "".join(steps(word_pieces, after_one)) == "日\ufffda"
    after_many = [*as_bytes(word_pieces, b"\xff" * 8), *as_bytes(word_pieces, "日".encode()), a]
    assert "".join(steps(word_pieces, after_many)) == "\ufffd" * 8 + "日a"


def test_a_long_run_of_invisible_tokens_holds_a_bounded_window(word_pieces: HuggingFaceTokenizer) -> None:
    end, world = ids_of(word_pieces, "</s>", "▁world")
    decoder: Any = word_pieces.decoder(ids_of(word_pieces, "a"))
    for _ in range(1000):
        assert decoder.step(end) == ""
    assert len(decoder._context) + len(decoder._held) < 10
    assert decoder.step(world) == " world"


def test_token_bytes_are_those_of_the_token_alone(
    byte_level: HuggingFaceTokenizer, word_pieces: HuggingFaceTokenizer
) -> None:
    token_ids = byte_level.encode("日")
    assert len(token_ids) > 1
    assert b"".join(map(byte_level.token_bytes, token_ids)) == "日".encode()
    assert word_pieces.token_bytes(ids_of(word_pieces, "日")[0]) == "日".encode()
    assert ByteTokenizer().token_bytes(ByteTokenizer.bos_token_id) == b"<bos>"


def test_text_that_is_no_unicode_is_the_callers_fault(joining: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="character 1"):
        joining.encode("a\ud800")


def test_token_id_is_none_for_an_unknown_spelling(joining: Tokenizer) -> None:
    assert joining.token_id("<nothing like this>") is None


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, byte_level_json: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level_json, encoding="utf-8")
    assert HuggingFaceTokenizer.from_file(path).decode(HuggingFaceTokenizer.from_file(path).encode("a dog")) == "a dog"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(CodecError, match="not a tokenizer"):
        HuggingFaceTokenizer.from_file(path)


def test_a_panic_of_the_library_is_an_error_of_the_tree() -> None:
    """A text on which the tokenizer's expression gives up."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    hard = tokenizers.Regex("(a+a+)+[xy]")
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(hard, behavior="isolated")
    tokenizer = HuggingFaceTokenizer(library)
    with pytest.raises(CodecError, match="a text of 30 characters") as failed:
        tokenizer.encode("a" * 30)
    assert not isinstance(failed.value.__cause__, Exception)
    assert tokenizer.encode("a") == [0]
