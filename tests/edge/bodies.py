"""Attacks by the form of one request's body: what is no request, an odd one, or JSON in another form."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from functools import partial

from .attack import Act, Attack
from .wire import CUT, Answer, Client, chunk, head

MB = 1_000_000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FITS = frozenset({200, 400, 413})
"""Where the size or the oddness alone is no reason to refuse."""

Body = Callable[[], bytes]
"""Makes a body when it is needed: some are large."""


def post(body: Body, path: str = CHAT, *, lines: tuple[str, ...] = (), time_s: float = 20) -> Act:
    """One request with this body; `lines` are further header lines."""

    def act(client: Client) -> list[Answer]:
        data, connection = body(), client.connect()
        connection.send(head(path=path, length=len(data), lines=lines) + data, time_s)
        return connection.answers(time_s)

    return act


def raw_chat(fields: str = "", *, content: str = '"hi"') -> bytes:
    """The JSON of a chat with raw JSON for its content and behind it."""
    more = f",{fields}" if fields else ""
    text = f'{{"model":"echo","max_tokens":2,"messages":[{{"role":"user","content":{content}}}]{more}}}'
    return text.encode("utf-8", "surrogatepass")


def raw_completion(prompt: str, fields: str = "") -> bytes:
    """The JSON of a completion with raw JSON for its prompt."""
    more = f",{fields}" if fields else ""
    return f'{{"model":"echo","max_tokens":2,"prompt":{prompt}{more}}}'.encode()


def nested(depth: int, opening: str = "[", inner: str = "", closing: str = "]") -> str:
    """JSON of that depth."""
    return opening * depth + inner + closing * depth


NONSENSE: Mapping[str, bytes] = {
    "empty": b"",
    "blanks": b" " * 1000,
    "half a chat": raw_chat()[:-1],
    "garbage behind": raw_chat() + b" x",
    "two chats": raw_chat() * 2,
    "a list": b"[]",
    "null": b"null",
    "a number": b"1e400",
    "UTF-16": b"\xff\xfe" + raw_chat().decode().encode("utf-16-le"),
    "UTF-32": raw_chat().decode().encode("utf-32-be"),
    "gzip that is not announced": gzip.compress(raw_chat()),
    "MessagePack": b"\x82\xa5model\xa4echo\xa8messages\x90",
    "NaN": raw_chat('"temperature":NaN'),
    "infinity": raw_chat('"temperature":-Infinity'),
    "hexadecimal": raw_chat('"seed":0x10'),
    "a number beyond 64 bits": raw_chat(f'"seed":{"9" * 25}'),
    "half a surrogate pair": raw_chat(content='"\\ud800"'),
    "NUL": raw_chat()[:-1] + b"\x00}",
    "a comment": b"/* */" + raw_chat(),
    "single quotes": raw_chat().replace(b'"', b"'"),
    "a key that is no text": b'{1:2,"model":"echo"}',
    "a trailing comma": raw_chat()[:-1] + b",}",
    "names of Python": raw_chat('"__class__":"x","__dict__":{},"__proto__":{}'),
}
"""Bodies that are no request: each gets a 400."""

ODD: Mapping[str, bytes] = {
    "a byte order mark": b"\xef\xbb\xbf" + raw_chat(),
    "overlong UTF-8": raw_chat().replace(b"hi", b"\xc0\xaf"),
    "a field twice": raw_chat('"n":1,"n":1'),
    "escapes everywhere": raw_chat(content='"' + "\\u0041" * 10_000 + '"'),
    "many characters": raw_chat(content=json.dumps("".join(map(chr, range(0xD800))))),
    "emoji": raw_chat(content=json.dumps("\U0001f9d1\u200d\U0001f680" * 20_000, ensure_ascii=False)),
    "combining marks": raw_chat(content=json.dumps("a" + "\u0301" * 100_000, ensure_ascii=False)),
}
"""Odd ones: each gets its answer or a 400."""


def _with_type(body: bytes, content_type: str) -> Act:
    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        given = f"content-type: {content_type}\r\n" if content_type else ""
        lines = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n{given}content-length: {len(body)}\r\n\r\n"
        connection.send(lines.encode() + body)
        return connection.answers()

    return act


def _in_chunks(parts: list[bytes]) -> Act:
    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        data = head(lines=("transfer-encoding: chunked",)) + b"".join(map(chunk, parts)) + b"0\r\n\r\n"
        connection.send(data)
        return connection.answers()

    return act


def _announced(length: int) -> Act:
    """A head that announces this many bytes, of which only the first comes."""

    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        connection.send(head(length=length) + b"{")
        return connection.answers()

    return act


def _encoded() -> list[Attack]:
    form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\necho\r\n--x--\r\n'
    chat = raw_chat()
    return [
        Attack(
            "a gzip bomb",
            post(lambda: gzip.compress(b" " * (20 * MB) + chat, 9), lines=("content-encoding: gzip",)),
        ),
        Attack(
            "deflate", post(lambda: gzip.compress(chat)[10:-8], lines=("content-encoding: deflate",)), group="encoded"
        ),
        Attack("a form", _with_type(form, "multipart/form-data; boundary=x"), {415}, group="encoded"),
        Attack("no content type", _with_type(chat, ""), {415}, group="encoded"),
        Attack(
            "a content type of 10 kB",
            _with_type(chat, "application/json; " + "a=b; " * 2000),
            FITS | {415, 431},
            group="encoded",
        ),
        Attack("another charset", _with_type(chat, "application/json; charset=utf-7"), FITS | {415}, group="encoded"),
    ]


def bodies() -> list[Attack]:
    """All of them."""
    letters = raw_chat(content=json.dumps("x" * 50_000))
    return [
        *(
            Attack(f"no request: {name}", post(partial(bytes, body)), group="no request")
            for name, body in NONSENSE.items()
        ),
        *(
            Attack(f"an odd request: {name}", post(partial(bytes, body)), FITS, group="odd requests")
            for name, body in ODD.items()
        ),
        *_encoded(),
        Attack("a body of 10 TB, announced", _announced(10**13), {413}, group="encoded"),
        Attack("a body without a length", _announced_none(), {400, CUT}, group="encoded"),
        Attack("one byte a chunk", _in_chunks([bytes([each]) for each in letters]), FITS),
    ]


def _announced_none() -> Act:
    """A POST without a length has no body; what comes next is no request."""

    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        connection.send(head() + raw_chat())
        return connection.answers()

    return act
