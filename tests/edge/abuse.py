"""Attacks by requests that are allowed: each uses as much as it may."""

from __future__ import annotations

import json

from .attack import NOT_MINE, Attack
from .bodies import CHAT, COMPLETIONS, raw_chat, raw_completion
from .peers import one, requests_at_once
from .sizes import entries

ANSWERED = NOT_MINE | {200}
_FOREVER = '"ignore_eos":true,"max_completion_tokens":1048576'
_TOOL = (
    '{"type":"function","function":{"name":"f#","parameters":{"type":"object","properties":{'
    + ",".join(f'"p{i}":{{"type":"string","description":"a parameter of a tool"}}' for i in range(20))
    + "}}}}"
)


def _prompts(size: int) -> str:
    return json.dumps(["word " * (size // 5)] * 128)


def _annotated() -> bytes:
    """A stream with everything beside its text that a request can have."""
    annotations = '"annotations":["formatted_prompt","token_ids","request_id"]'
    fields = '"extra_fields":["worker_id","timing","completion_token_ids"]'
    return raw_chat(f'"stream":true,"nvext":{{{annotations},{fields}}}', content='"' + "x" * 50_000 + '"')


def abuse() -> list[Attack]:
    """All of them."""
    many = f'"n":128,{_FOREVER}'
    streamed = raw_chat(f'"stream":true,{many}')
    logprobs = '"logprobs":true,"top_logprobs":20,"ignore_eos":true,"max_completion_tokens":2000'
    texts = json.dumps([f"{i}" * 4000 for i in range(32)])
    return [
        Attack("128 choices of a million tokens", one(raw_chat(many)), ANSWERED, memory_mb=96, is_slow=True),
        Attack("128 streamed choices of a million tokens", one(streamed), ANSWERED),
        Attack("20 chats of a million tokens", requests_at_once(raw_chat(_FOREVER), 20), ANSWERED, memory_mb=96),
        Attack("128 prompts of 8 kB", one(raw_completion(_prompts(8000)), COMPLETIONS, 20), ANSWERED, memory_mb=256),
        Attack("32 stop strings of 4 kB", one(raw_chat(f'"stop":{texts},{logprobs}')), ANSWERED),
        Attack("20 log probabilities of each token", one(raw_chat(logprobs), read_s=20), ANSWERED, memory_mb=64),
        Attack("log probabilities of a prompt", one(raw_chat('"prompt_logprobs":4294967295')), ANSWERED, group="abuse"),
        Attack("best of 20", one(raw_completion('"x"', '"best_of":20'), COMPLETIONS), {400}, group="abuse"),
        Attack("1536 tools of 1 kB", one(raw_chat(f'"tools":[{entries(1536, _TOOL)}]')), ANSWERED, memory_mb=96),
        Attack("200 chats at once", requests_at_once(raw_chat(), 200, read_s=20), ANSWERED, stall_s=1.0),
        Attack("annotations of all", one(_annotated()), ANSWERED, group="abuse"),
        Attack(
            "a guide of backtracking", one(raw_chat(f'"guided_regex":{json.dumps("(a+)+$" * 1000)}')), ANSWERED,
            group="abuse"),
        Attack("a seed and penalties at their ends", one(raw_chat(
            '"seed":-9223372036854775808,"temperature":2,"top_k":-1,"min_p":1,"repetition_penalty":1e-300')), ANSWERED,
            group="abuse"),
        Attack("a routing to a worker that is none", one(raw_chat(
            '"nvext":{"backend_instance_id":18446744073709551615,"dp_rank":4294967295}')), ANSWERED, group="abuse"),
        Attack("200 requests that are refused", requests_at_once(raw_chat('"n":0'), 200), {400, 429}, stall_s=0.5),
        Attack("a path of many parts", one(b"{}", CHAT + "/a" * 3000), {404, 414, 431, 400}, group="abuse"),
    ]  # fmt: skip
