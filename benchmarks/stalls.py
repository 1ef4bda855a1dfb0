"""What a long prompt costs the streams beside it: gaps between tokens of 50 streams, alone and beside 2 MB chats.

    python -m benchmarks.stalls [--checkout FOLDER] [--models bytes bpe] [--streams 50] [--seconds 10] [--megabytes 2]

A server of its own with a mock engine, `penstock serve` of this checkout or another one, is called over HTTP. While the
streams run, one client sends chats of that size, one after the other; the engine refuses them, for it has no room for
them, so that what is seen is the front end's part and no simulated prefill. `bytes` is the built-in model, `bpe` has a
tokenizer that is trained here and splits as Llama 3 does. Given is the 99th percentile of the gaps, and the longest.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
from anyio.abc import SocketStream
from attrs import field, frozen
from rich.console import Console
from rich.table import Table

from operators.text import WHOLE_CHAT

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WARM_UP_S = 2.0
_STREAM_TOKENS = 1_000_000
_START_TIMEOUT_S = 60.0


@frozen
class Gaps:
    """The times between two tokens of one stream, of all streams, in milliseconds."""

    found: list[float] = field(factory=list)
    last_s: dict[int, float] = field(factory=dict)
    """When each stream had its last token."""
    prompts: list[float] = field(factory=list)
    """How long each of the long prompts took, in seconds."""

    def close(self, now_s: float) -> None:
        """Counts the gaps that have not ended: a stream that stands still has one long gap."""
        self.found.extend(1e3 * (now_s - last_s) for last_s in self.last_s.values())

    def share(self, share: float) -> float:
        ordered = sorted(self.found)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def words(characters: int, seed: int) -> str:
    """Made up words of letters as often as in English, with numbers, marks and lines."""
    rng = Random(seed)
    letters, weights = "etaoinshrdlucmfwypvbgkqjxz", range(26, 0, -1)
    known = ["".join(rng.choices(letters, weights, k=rng.randint(1, 10))) for _ in range(5_000)]
    ends = [" ", " ", " ", " ", ", ", ". ", "\n", " 12 "]
    found = [rng.choice(known) + rng.choice(ends) for _ in range(characters // 4)]
    return "".join(found)[:characters]


def write_bpe_model(folder: Path) -> None:
    """Writes a model folder whose tokenizer is trained on such words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_LLAMA3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=8_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([words(400_000, 1)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": WHOLE_CHAT}))


@contextmanager
def server(checkout: Path, model: Path | None) -> Iterator[int]:
    """A server of its own on a free port."""
    command = [sys.executable, "-m", "serving", "serve", "--port", "0", "--engine", "mocker", "--model-name", "m"]
    if model is not None:
        command += ["--model-path", str(model)]
    process = subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _port_of(process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def _port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    lines = []
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and (line := process.stdout.readline()):
        lines.append(line)
        if found := re.search(r"http://[\d.]+:(\d+)", line):
            return int(found[1])
    raise SystemExit("the server did not start:\n" + "".join(lines))


@asynccontextmanager
async def posted(port: int, body: Mapping[str, Any]) -> AsyncIterator[SocketStream]:
    """A connection with a chat sent on it."""
    async with sent(port, json.dumps(body).encode()) as connection:
        yield connection


@asynccontextmanager
async def sent(port: int, content: bytes) -> AsyncIterator[SocketStream]:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(head.encode() + content)
        yield connection


async def read_stream(port: int, number: int, gaps: list[Gaps]) -> None:
    """Notes the gaps of one stream in the last record of the list."""
    chat = {"model": "m", "messages": [{"role": "user", "content": f"stream {number}"}], "stream": True}
    async with posted(port, {**chat, "max_tokens": _STREAM_TOKENS, "ignore_eos": True}) as connection:
        before_s = None
        async for data in connection:
            now_s, window = time.perf_counter(), gaps[-1]
            if tokens := data.count(b"data: "):
                if before_s is not None:
                    window.found.extend([0.0] * (tokens - 1))
                    window.found.append(1e3 * (now_s - before_s))
                before_s = window.last_s[number] = now_s


async def send_prompts(port: int, content: bytes, gaps: Gaps) -> None:
    """One long chat after the other, until cancelled."""
    while True:
        began_s = time.perf_counter()
        async with sent(port, content) as connection:
            async for _ in connection:
                pass
        gaps.prompts.append(time.perf_counter() - began_s)


async def measure(port: int, streams: int, seconds: float, characters: int) -> tuple[Gaps, Gaps]:
    """The gaps undisturbed, and beside long prompts."""
    gaps = [Gaps()]
    messages = [{"role": "user", "content": words(characters, 2)}]
    content = json.dumps({"model": "m", "messages": messages, "max_tokens": 1}).encode()
    async with anyio.create_task_group() as readers:
        for number in range(streams):
            readers.start_soon(read_stream, port, number, gaps)
        await anyio.sleep(_WARM_UP_S)
        gaps.append(Gaps())
        await anyio.sleep(seconds)
        gaps.append(Gaps(last_s=gaps[-1].last_s.copy()))
        with anyio.move_on_after(seconds):
            await send_prompts(port, content, gaps[-1])
        gaps[-1].close(time.perf_counter())
        readers.cancel_scope.cancel()
    return gaps[1], gaps[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls", description="Streams beside long prompts.")
    parser.add_argument("--checkout", type=Path, default=Path.cwd(), help="whose server is measured")
    parser.add_argument("--models", nargs="+", choices=["bytes", "bpe"], default=["bytes", "bpe"])
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--megabytes", type=float, default=2.0)
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.streams} streams beside chats of {arguments.megabytes} MB")
    for column in ("model", "tokens/s alone", "p99 gap", "beside: tokens/s", "p99 gap", "ratio", "longest", "prompts"):
        table.add_column(column, justify="right")
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            if name == "bpe":
                write_bpe_model(Path(folder))
            with server(arguments.checkout, Path(folder) if name == "bpe" else None) as port:
                alone, beside = anyio.run(
                    measure, port, arguments.streams, arguments.seconds, int(arguments.megabytes * 1e6),
                    backend_options={"use_uvloop": True},
                )  # fmt: skip
        took = f"{len(beside.prompts)} in {sum(beside.prompts) / max(1, len(beside.prompts)):.2f} s each"
        table.add_row(
            name,
            f"{len(alone.found) / arguments.seconds:.0f}",
            f"{alone.share(0.99):.1f} ms",
            f"{len(beside.found) / arguments.seconds:.0f}",
            f"{beside.share(0.99):.1f} ms",
            f"{beside.share(0.99) / alone.share(0.99):.2f}",
            f"{max(beside.found):.0f} ms",
            took,
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
