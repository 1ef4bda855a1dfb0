"""Tokenizers: text to token ids and back. The one door of the `tokenizers` library, loaded on first use.

Source: dynamo lib/llm/src/tokenizers.rs. Other than there, decoding does not use the library's `DecodeStream` (0.6 µs
a token): it fails on bytes that are no character, repeats a prompt that ends inside one, skips unknown ids silently
and cannot give up what it holds. Ours take 0.2 µs where texts are joined bytes, 2 to 3 µs elsewhere.

ByteTokenizer: one token per byte of UTF-8, built in; for echoes, tests and examples.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pipeline import InvalidArgument
from pipeline.errors import CodecError
from pipeline.extras import brought_by
from pipeline.foreign import raise_if_ours

from .decoding import PieceDecoder, Pieces, TextDecoder, WindowDecoder
from .text_cuts import PIECE_CHARACTERS, TextCuts

if TYPE_CHECKING:
    import tokenizers


_CHECKED_AT_ONCE = 16_384
"""Token ids that are compared with the vocabulary in one call."""


class Tokenizer(Protocol):
    """What operators need of a tokenizer. Ids that are no token raise CodecError wherever they are decoded.

    `encode` and `first_unknown` are called in other threads for long prompts, by several at a time, while the loop's
    own calls any method: all of them must be thread-safe. An `encode` that holds the interpreter's lock for long stalls
    every stream of the process all the same; one that also has `pieces`, see `CutsText`, does so no longer.
    """

    def encode(self, text: str) -> list[int]:
        """The ids of the text, special tokens written out in it included, none added.

        Raises InvalidArgument for text that is no Unicode, CodecError for text the tokenizer fails on.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids together."""
        ...

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> TextDecoder:
        """A decoder for the text that follows the prompt."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token alone; of a special token, those of its name."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling."""
        ...

    def first_unknown(self, token_ids: Sequence[int]) -> int | None:
        """Return the place of the first id that is no token, None if all are tokens."""
        ...


@runtime_checkable
class CutsText(Protocol):
    """A tokenizer that knows where a text may be cut."""

    def pieces(self, text: str, unbroken_max: int = 0) -> Iterator[str]:
        """The text in pieces whose token ids, joined, are those of the text.

        Raises InvalidArgument for a run of more than `unbroken_max` characters that cannot be cut; 0 is no limit.
        """
        ...


def first_outside(known: Container[int], token_ids: Sequence[int]) -> int | None:
    """Return the place of the first id that is not among those known, None if all are."""
    if not isinstance(known, range):
        return next((place for place, token_id in enumerate(token_ids) if token_id not in known), None)
    for start in range(0, len(token_ids), _CHECKED_AT_ONCE):
        piece = token_ids[start : start + _CHECKED_AT_ONCE]
        if min(piece) < known.start or max(piece) >= known.stop:
            return next(start + place for place, token_id in enumerate(piece) if token_id not in known)
    return None


class HuggingFaceTokenizer:
    """A tokenizer of a `tokenizer.json`.

    Truncation and padding set in the file are switched off: they are for training, would cut
    long prompts in silence, and would count padding as tokens of the prompt.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        with brought_by("serve", by="HuggingFaceTokenizer"):
            from tokenizers.decoders import ByteLevel

        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        # Nearly every vocabulary is without gaps, and a range takes no memory.
        self._ids: Container[int] = range(len(ids)) if max(ids, default=-1) == len(ids) - 1 else ids
        self._joins_bytes = isinstance(tokenizer.decoder, ByteLevel)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._cuts = TextCuts(_splitting(tokenizer))
        # Filled by use and shared by all requests.
        self._pieces = {skip: Pieces(self._shown_bytes if skip else self.token_bytes) for skip in (True, False)}

    @classmethod
    def from_file(cls, path: Path | str) -> HuggingFaceTokenizer:
        """Reads a `tokenizer.json`.

        Raises CodecError if it is none, OSError if there is no such file, and ModuleNotFoundError without the library.
        """
        with brought_by("serve", by="HuggingFaceTokenizer"):
            import tokenizers

        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:  # the library raises plain exceptions only
            raise CodecError(f"not a tokenizer: {error}") from error

    def write(self, path: Path) -> None:
        """Write a `tokenizer.json` with the same tokenizer. Raise OSError if it cannot be written."""
        path.write_text(self._tokenizer.to_str(), encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        checked_unicode(text)
        try:
            # Other than `encode` it lets other threads run, and does without offsets, which are half the cost.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids
        except BaseException as error:  # a panic of the library too
            raise_if_ours(error)
            raise CodecError(f"the tokenizer failed on a text of {len(text)} characters: {error}") from error

    def pieces(self, text: str, unbroken_max: int = 0) -> Iterator[str]:
        """See `CutsText`. One piece, whatever its length, if the tokenizer's file has parts that `TextCuts` does not
        know."""
        return self._cuts.pieces(text, unbroken_max)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        for token_id in token_ids:
            self._spelling(token_id)
        return self._decode(token_ids, skip_special_tokens)

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> TextDecoder:
        if self._joins_bytes:
            return PieceDecoder(self._pieces[skip_special_tokens], prompt)
        return WindowDecoder(lambda ids: self._decode(ids, skip_special_tokens), self._spelling, prompt)

    def token_bytes(self, token_id: int) -> bytes:
        spelling = self._spelling(token_id)
        if not self._joins_bytes:
            return self.decode([token_id], skip_special_tokens=False).encode()
        try:
            return bytes(map(_BYTE_OF.__getitem__, spelling))
        except KeyError:  # an added token is plain text
            return spelling.encode()

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def first_unknown(self, token_ids: Sequence[int]) -> int | None:
        return first_outside(self._ids, token_ids)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise_if_ours(error)
            raise CodecError(f"the tokenizer failed on {len(token_ids)} tokens: {error}") from error

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special else self.token_bytes(token_id)

    def _spelling(self, token_id: int) -> str:
        try:
            spelling = self._tokenizer.id_to_token(token_id)
        except OverflowError:  # negative, or more than 32 bits
            spelling = None
        if spelling is None:
            raise unknown_token(token_id)
        return spelling


def _splitting(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """What the tokenizer does to a text before its model sees it, as its file has it; nothing of parts in Python."""
    try:
        return {
            "normalizer": _state(tokenizer.normalizer),
            "pre_tokenizer": _state(tokenizer.pre_tokenizer),
            "added_tokens": [
                {"content": token.content, "rstrip": token.rstrip, "single_word": token.single_word}
                for token in tokenizer.get_added_tokens_decoder().values()
            ],
        }
    except Exception:  # a part written in Python has no such form
        return {}


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: printable ones for themselves, the rest moved."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()


def checked_unicode(text: str) -> bytes:
    """The text in UTF-8. Raises InvalidArgument if it holds half a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the text is not valid Unicode at character {error.start}") from error


def unknown_token(token_id: int) -> CodecError:
    """The error for an id outside the vocabulary."""
    return CodecError(f"token id {token_id} is not in the vocabulary")


_BYTES = 256
_SPECIAL = ("<bos>", "<eos>")


class ByteTokenizer:
    """Ids 0 to 255 are bytes, then come `<bos>` and `<eos>`. Text never encodes to the special ones."""

    bos_token_id = _BYTES
    eos_token_id = _BYTES + 1

    def __init__(self) -> None:
        self._pieces = {skip: Pieces(self._shown_bytes if skip else self.token_bytes) for skip in (True, False)}

    def encode(self, text: str) -> list[int]:
        return list(checked_unicode(text))

    def pieces(self, text: str, unbroken_max: int = 0) -> Iterator[str]:
        """See `CutsText`. It may be cut anywhere."""
        return (text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = self._shown_bytes if skip_special_tokens else self.token_bytes
        return b"".join(map(shown, token_ids)).decode(errors="replace")

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> TextDecoder:
        return PieceDecoder(self._pieces[skip_special_tokens], prompt)

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < _BYTES:
            return bytes([token_id])
        if _BYTES <= token_id < _BYTES + len(_SPECIAL):
            return _SPECIAL[token_id - _BYTES].encode()
        raise unknown_token(token_id)

    def token_id(self, token: str) -> int | None:
        return _BYTES + _SPECIAL.index(token) if token in _SPECIAL else None

    def first_unknown(self, token_ids: Sequence[int]) -> int | None:
        return first_outside(range(_BYTES + len(_SPECIAL)), token_ids)

    def _shown_bytes(self, token_id: int) -> bytes:
        data = self.token_bytes(token_id)
        return data if token_id < _BYTES else b""
