"""Attacks by the size of one request: too many of something, too long a part, or nested too deeply."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

from .attack import NOT_MINE, Attack, Engine
from .bodies import CHAT, COMPLETIONS, FITS, MB, Body, nested, post, raw_chat, raw_completion


def entries(count: int, form: str) -> str:
    """Comma-separated JSON of that many entries; `#` in the form is the number."""
    return ",".join(form.replace("#", str(i)) for i in range(count))


def _stops(total_bytes: int) -> str:
    """As many stop strings as may be, alike but for their ends."""
    return json.dumps([("ab" * (total_bytes // 64)) + f"c{i}" for i in range(32)])


def _messages(count: int) -> bytes:
    return b'{"model":"echo","messages":[' + entries(count, '{"role":"user","content":""}').encode() + b"]}"


def measured(scale: int) -> list[Attack]:
    """What the issue measured: at 1 about a second each where nothing bounds it, at 10 about the issue's own size."""
    k, longest_mb = scale * 1000, min(scale, 4)
    longest = longest_mb * MB
    make = partial(_measured, scale)
    return [
        make("empty prompts", lambda: raw_completion("[" + "[]," * (350 * k) + "[]]"), scale, path=COMPLETIONS),
        make("control characters", lambda: raw_chat(content=f'"{chr(1) * 4000 * k}"'), 4 * scale, fits=True),
        make("quotes", lambda: raw_chat(content='"' * 4000 * k), 4 * scale),
        make("messages", lambda: _messages(140 * k), 4 * scale, fits=True),
        make("logit_bias", lambda: raw_chat(f'"logit_bias":{{{entries(300 * k, _BIAS)}}}'), 3 * scale),
        make("unknown fields", lambda: raw_chat(entries(300 * k, '"x#":1')), 3 * scale),
        make("a long chat", lambda: raw_chat(content=_words(2 * longest)), 2 * longest_mb, fits=True),
        make("a chat in tokens", lambda: raw_chat(content=_words(longest)), longest_mb, fits=True, engine="tokens"),
        make("spaces in tokens", lambda: raw_chat(content=_spaces(longest)), longest_mb, fits=True, engine="tokens"),
        make("a stop string", lambda: _stopping(300 * k), scale, engine="echo"),
        make("32 stop strings", lambda: raw_chat(f'"stop":{_stops(MB * scale)}'), scale),
    ]


def _measured(
    scale: int, name: str, body: Body, size_mb: float, *, path: str = CHAT, fits: bool = False, engine: Engine = "mock"
) -> Attack:
    # Text, tokens and blocks of a request that is answered; one that is refused is held once, as it came.
    memory_mb = 32 + (48 if fits else 4) * size_mb
    is_slow = scale > 1
    act = post(body, path, time_s=120 if is_slow else 20)
    statuses = FITS if fits else NOT_MINE
    name = f"{name}, {'full size' if is_slow else 'small'}"
    return Attack(name, act, statuses, memory_mb, engine=engine, is_slow=is_slow)


def _stopping(length: int) -> bytes:
    """A chat whose answer is the beginning of its stop string, up to the very end."""
    return raw_chat(f'"stop":"{"a" * length}b","max_completion_tokens":{length}', content=f'"{"a" * length}"')


def _spaces(count: int) -> str:
    return f'"x{" " * count}x"'


_BIAS = '"#":1'


def _words(count_bytes: int) -> str:
    return json.dumps("word " * (count_bytes // 5))


DEEP: Mapping[str, Body] = {
    "lists": lambda: b'{"model":"echo","messages":' + nested(MB).encode() + b"}",
    "objects": lambda: b'{"model":"echo","messages":' + nested(300_000, '{"a":', "1", "}").encode() + b"}",
    "lists without an end": lambda: b"[" * (2 * MB),
    "objects without an end": lambda: b'{"a":' * 400_000,
    "a schema": lambda: raw_chat(f'"guided_json":{nested(50_000, _OPEN, "1", "}")}'),
    "keys of a message": lambda: raw_chat().replace(b'"hi"', b'"hi","y":' + nested(100_000).encode()),
    "template arguments": lambda: raw_chat(f'"chat_template_args":{{"a":{nested(100_000)}}}'),
    "metadata": lambda: raw_chat(f'"metadata":{{"a":{nested(100_000)}}}'),
}
"""Nested beyond any use: each gets a 400."""
_OPEN = '{"a":'
_TOOL = '{"type":"function","function":{"name":"f#"}}'

LONG: Mapping[str, tuple[str, Body]] = {
    "a number": (CHAT, lambda: raw_chat(f'"seed":{"9" * MB}')),
    "a fraction": (CHAT, lambda: raw_chat(f'"temperature":9.{"1" * MB}')),
    "an exponent": (CHAT, lambda: raw_chat(f'"temperature":1e{"9" * MB}')),
    "a model name": (CHAT, lambda: raw_chat().replace(b"echo", b"m" * MB)),
    "a key": (CHAT, lambda: raw_chat(f'"{"k" * MB}":1')),
    "a user of blanks": (CHAT, lambda: raw_chat(f'"user":"{" " * MB}"')),
    "a role": (CHAT, lambda: raw_chat().replace(b'"user"', b'"' + b"r" * MB + b'"')),
    "a tool name": (
        CHAT,
        lambda: raw_chat(f'"tools":[{{"type":"function","function":{{"name":"{"f" * MB}"}}}}]'),
    ),
    "a key of logit_bias": (CHAT, lambda: raw_chat(f'"logit_bias":{{"{"1" * MB}":1000}}')),
    "a service tier": (CHAT, lambda: raw_chat(f'"service_tier":"{"t" * MB}"')),
    "a modality": (CHAT, lambda: raw_chat(f'"modalities":["{"t" * MB}"]')),
    "a tool choice": (
        CHAT,
        lambda: raw_chat(f'"tool_choice":{{"type":"function","function":{{"name":"{"t" * MB}"}}}}'),
    ),
    "base64 that is none": (COMPLETIONS, lambda: raw_completion("null", f'"prompt_embeds":"{"=" * MB}"')),
    "an id behind 500,000 that is none": (COMPLETIONS, lambda: raw_completion("[" + "1," * 500_000 + '"x"]')),
    "token ids that no record holds": (COMPLETIONS, lambda: raw_completion(f"[{entries(100_000, '4294967296')}]")),
    "129 prompts": (COMPLETIONS, lambda: raw_completion(json.dumps(["x"] * 129))),
    "prompts and choices": (COMPLETIONS, lambda: raw_completion(json.dumps(["x"] * 100), '"n":2')),
    "prompts of different kinds": (COMPLETIONS, lambda: raw_completion('["a",1,[2]]')),
    "1537 tools": (CHAT, lambda: raw_chat(f'"tools":[{entries(1537, _TOOL)}]')),
    "33 stop strings": (CHAT, lambda: raw_chat('"stop":["' + '","'.join(map(str, range(33))) + '"]')),
    "stop ids": (CHAT, lambda: raw_chat(f'"stop_token_ids":[{entries(200_000, "#")}]')),
    "bad words": (CHAT, lambda: raw_chat(f'"bad_words_token_ids":[{entries(200_000, "[#]")}]')),
    "choices of a guide": (CHAT, lambda: raw_chat(f'"guided_choice":[{entries(200_000, _TEXT)}]')),
    "annotations": (CHAT, lambda: raw_chat(f'"nvext":{{"annotations":[{entries(200_000, _TEXT)}]}}')),
    "extra fields": (CHAT, lambda: raw_chat(f'"nvext":{{"extra_fields":[{entries(200_000, _TEXT)}]}}')),
    "content parts": (
        CHAT,
        lambda: raw_chat(content=f"[{entries(50_000, _PART)}]"),
    ),
    "tool calls": (
        CHAT,
        lambda: raw_chat().replace(b'"hi"', f'"hi","tool_calls":[{entries(20_000, _CALL)}]'.encode()),
    ),
}
"""One part that is too long or too many of one kind."""
_TEXT = '"a#"'
_PART = '{"type":"text","text":"x"}'
_CALL = '{"id":"#","type":"function","function":{"name":"f","arguments":"{}"}}'
MAY_FIT = {"stop ids", "bad words", "choices of a guide", "annotations", "extra fields", "content parts", "tool calls"}
"""Those that may be answered, or refused."""


def sizes() -> list[Attack]:
    """All of them."""
    return [
        *measured(1),
        *measured(10),
        *(Attack(f"nested: {name}", post(body), group="nested") for name, body in DEEP.items()),
        *(
            Attack(
                f"long: {name}",
                post(body, path),
                FITS if name in MAY_FIT else {400, 404, 413},
                memory_mb=96,
                group="long parts",
            )
            for name, (path, body) in LONG.items()
        ),
    ]
