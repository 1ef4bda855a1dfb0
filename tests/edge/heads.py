"""Attacks by the head of a request, by chunks, and by several requests at once: whatever comes before a request is
known."""

from __future__ import annotations

from collections.abc import Mapping

from .attack import NOT_MINE, Act, Attack
from .bodies import FITS, MB, raw_chat
from .wire import CUT, Answer, Client, chunk, head

REFUSED = NOT_MINE | {CUT}
ANY = REFUSED | {200}
GET = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = head(lines=("transfer-encoding: chunked",))


def raw(data: bytes, *, most: int = 1, time_s: float = 5, half_close: bool = False) -> Act:
    """These bytes over one connection; up to `most` answers."""

    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        connection.send(data)
        if half_close:
            connection.half_close()
        return connection.answers(time_s, most=most)

    return act


def _get(*lines: str, target: str = "/live", method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join([f"{method} {target} {version}", "host: a", *lines, "", ""]).encode("latin-1")


def _chat(*lines: str) -> bytes:
    return head(lines=lines) + raw_chat()


LENGTH = f"content-length: {len(raw_chat())}"

BAD_HEADS: Mapping[str, bytes] = {
    "two lengths": _chat(LENGTH, "content-length: 5"),
    "a list of lengths": _chat("content-length: 5, 6"),
    "a negative length": _chat("content-length: -1"),
    "a length with a sign": _chat("content-length: +5"),
    "a length beyond 64 bits": _chat(f"content-length: {10**30}"),
    "a length in hexadecimal": _chat("content-length: 0x10"),
    "a blank in a header's name": _get("a b: c"),
    "a blank behind a header's name": _get("content-length : 0"),
    "a header without a name": _get(": c"),
    "a header without a colon": _get("nonsense"),
    "NUL in a header": _get("a: b\x00c"),
    "a bare carriage return": b"GET /live HTTP/1.1\rhost: a\r\n\r\n",
    "a lower-case method": _get(method="get"),
    "an unknown method": _get(method="BREW"),
    "a method of 10 kB": _get(method="A" * 10_000),
    "no target": b"GET  HTTP/1.1\r\nhost: a\r\n\r\n",
    "a blank in the target": _get(target="/a b"),
    "NUL in the target": _get(target="/\x00"),
    "HTTP/0.9": b"GET /live\r\n",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "HTTP/9.9": _get(version="HTTP/9.9"),
    "a version that is none": _get(version="HTTPS/1.1"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "SSH": b"SSH-2.0-OpenSSH_9.9\r\n",
    "random bytes": bytes(range(256)) * 40,
    "SMTP": b"EHLO a\r\nMAIL FROM:<a@b>\r\n",
}
"""What is no HTTP: refused, or cut."""

LARGE_HEADS: Mapping[str, bytes] = {
    "10,000 headers": _get(*[f"a{i}: b" for i in range(10_000)]),
    "one header of 1 MB": _get("a: " + "b" * MB),
    "one header's name of 1 MB": _get("a" * MB + ": b"),
    "a target of 1 MB": _get(target="/" + "a" * MB),
    "a query of 1 MB": _get(target="/live?" + "a" * MB),
    "a request id of 200 kB": _get("x-request-id: " + "a" * 200_000),
    "cookies of 1 MB": _get(*[f"cookie: {'c' * 1000}"] * 1000),
    "metadata of 1 MB": _chat(LENGTH, *[f"x-dynamo-meta-{i}: {'m' * 10_000}" for i in range(100)]),
    "a session of 1 MB": _chat(LENGTH, "x-dynamo-session-id: " + "s" * MB),
    "a tenant of 1 MB": _chat(LENGTH, "x-tenant-id: " + "t" * MB),
    "a trailer of 1 MB": CHUNKED + chunk(raw_chat()) + b"0\r\na: " + b"b" * MB + b"\r\n\r\n",
    "100,000 trailers": CHUNKED + chunk(raw_chat()) + b"0\r\n" + b"a: b\r\n" * 100_000 + b"\r\n",
    "a line folded 100,000 times": _get("a: b" + "\r\n c" * 100_000),
}
"""Heads beyond `max_header_bytes` and other limits: each gets 431, 414 or 400, or is cut."""

ODD_HEADS: Mapping[str, bytes] = {
    # Within `max_header_bytes`, or dropped as they come, so that they cost no more than their bytes:
    "a request id of 100 kB": _get("x-request-id: " + "a" * 100_000),
    "10,000 trailers": CHUNKED + chunk(raw_chat()) + b"0\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    "100,000 empty lines": b"\r\n" * 100_000 + GET,
    "an absolute target": _get(target="http://elsewhere/live"),
    "a target of another host's port": _get(target="elsewhere:80", method="CONNECT"),
    "an asterisk": _get(target="*", method="OPTIONS"),
    "TRACE": _get(method="TRACE"),
    "no host": b"GET /live HTTP/1.1\r\n\r\n",
    "two hosts": _get("host: b"),
    "HTTP/1.0": _get(version="HTTP/1.0"),
    "an upgrade to a WebSocket": _get(
        "upgrade: websocket", "connection: upgrade", "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
        "sec-websocket-version: 13",
    ),
    "an upgrade to HTTP/2": _get("upgrade: h2c", "connection: upgrade, http2-settings", "http2-settings: AAAA"),
    "a folded line": _get("a: b\r\n c"),
    "bytes above 127 in a header": _get("a: \xe9\xff", "x-request-id: \xe9"),
    "bytes above 127 in the target": _get(target="/\xe9"),
    "escapes in the target": _get(target="/%00%0d%0a%2e%2e/%ff/live"),
    "dots in the target": _get(target="/../../etc/passwd"),
    "a thousand connections in one": _get("connection: " + ", ".join(["close"] * 500)),
    "a trace parent of nonsense": _chat(LENGTH, "traceparent: 00-" + "0" * 32 + "-x-99", "tracestate: " + "=" * 1000),
    "numbers that are none in headers": _chat(
        LENGTH, "x-dynamo-dp-rank: -1", "x-worker-instance-id: 99999999999999999999", "x-dynamo-request-priority: 1e9",
    ),
}  # fmt: skip
"""Heads that are unusual: answered somehow."""


def _smuggled(first: bytes) -> bytes:
    """A request, and behind it one that only a server sees that reads the first one otherwise."""
    return first + b"GET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n"


SMUGGLED: Mapping[str, bytes] = {
    "a length and chunks": _smuggled(head(lines=("content-length: 4", "transfer-encoding: chunked")) + b"0\r\n\r\n"),
    "chunks, and a length": _smuggled(head(lines=("transfer-encoding: chunked", "content-length: 4")) + b"0\r\n\r\n"),
    "an encoding that is none": _smuggled(head(lines=("transfer-encoding: xchunked",)) + b"0\r\n\r\n"),
    "chunks that are not the last encoding": _smuggled(
        head(lines=("transfer-encoding: chunked, identity",)) + b"0\r\n\r\n"
    ),
    "two encodings": _smuggled(
        head(lines=("transfer-encoding: chunked", "transfer-encoding: identity")) + b"0\r\n\r\n"
    ),
    "an encoding with a vertical tab": _smuggled(head(lines=("transfer-encoding:\x0bchunked",)) + b"0\r\n\r\n"),
    "chunks in HTTP/1.0": _smuggled(
        head(lines=("transfer-encoding: chunked",)).replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n"
    ),
    "a bare carriage return in a chunk": _smuggled(CHUNKED + b"1\rX\r\n{\r\n0\r\n\r\n"),
    "a length with a blank inside": _smuggled(head(lines=("content-length: 1 0",))),
}
"""Two readings of one request: only the first may be answered, and the connection ends."""

BAD_CHUNKS: Mapping[str, bytes] = {
    "a size that is none": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a negative size": CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n",
    "a size beyond 64 bits": CHUNKED + b"f" * 17 + b"\r\n{}",
    "a size of a thousand digits": CHUNKED + b"0" * 1000 + b"2\r\n{}\r\n0\r\n\r\n",
    "a size with 0x": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "no line end behind the data": CHUNKED + b"2\r\n{}0\r\n\r\n",
    "an empty size": CHUNKED + b"\r\n{}\r\n",
    "an extension of 1 MB": CHUNKED + chunk(raw_chat(), b";a=" + b"b" * MB) + b"0\r\n\r\n",
    "extensions of 10 kB on 100 chunks": CHUNKED + b"".join([chunk(b" ", b";" + b"e" * 10_000)] * 100) + b"0\r\n\r\n",
    "a length among the trailers": CHUNKED + chunk(raw_chat()) + b"0\r\ncontent-length: 9\r\n\r\n",
}
"""Chunks that are wrong, or hold something else than the body."""


def _huge_chunk() -> Act:
    """A chunk of 4 GB, of which the server reads no more than a body may have."""

    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        connection.send(CHUNKED + b"ffffffff\r\n")
        for _ in range(60):
            if connection.received or not connection.send(b" " * MB):
                break
        return connection.answers()

    return act


def _headers_without_end(total_mb: int) -> Act:
    """Headers as long as the server takes them."""
    lines = b"".join(b"a%d: %s\r\n" % (i, b"b" * 990) for i in range(1000))

    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        connection.send(GET[:-2])
        for _ in range(total_mb):
            if connection.received or connection.is_cut or not connection.send(lines):
                break
        connection.send(b"\r\n")
        return connection.answers()

    return act


def _expect(value: str) -> Act:
    """The body comes once the server wants it, or after all."""

    def act(client: Client) -> list[Answer]:
        connection = client.connect()
        connection.send(head(length=len(raw_chat()), lines=(f"expect: {value}",)))
        connection.read(1.0)
        connection.send(raw_chat())
        return connection.answers()

    return act


def heads() -> list[Attack]:
    """All of them."""
    return [
        *(
            Attack(f"no HTTP: {name}", raw(data, half_close=True), REFUSED, group="no HTTP")
            for name, data in BAD_HEADS.items()
        ),
        *(
            Attack(f"a large head: {name}", raw(data), REFUSED, group="large heads")
            for name, data in LARGE_HEADS.items()
        ),
        *(Attack(f"an odd head: {name}", raw(data), ANY, group="odd heads") for name, data in ODD_HEADS.items()),
        *(
            Attack(
                f"smuggled: {name}",
                raw(data, most=2, time_s=2, half_close=True),
                ANY,
                is_smuggled=True,
                group="smuggled",
            )
            for name, data in SMUGGLED.items()
        ),
        *(Attack(f"chunks: {name}", raw(data), ANY, group="chunks") for name, data in BAD_CHUNKS.items()),
        Attack("chunks: one of 4 GB", _huge_chunk(), {413, CUT}, memory_mb=160),
        Attack("headers, small", _headers_without_end(2), {431, CUT}),
        Attack("headers, full size", _headers_without_end(100), {431, CUT}, is_slow=True),
        Attack("expect 100-continue", _expect("100-continue"), FITS),
        Attack("expect nonsense", _expect("nonsense"), FITS | {417}),
    ]
