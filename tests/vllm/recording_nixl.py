"""A prompt computed by one vLLM server and continued by another, over NIXL, as records.

.venv/bin/python -m tests.vllm.recording_nixl PREFILL_URL DECODE_URL > tests/engines/upstream/recorded/vllm_nixl.json
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import httpx2

from tests.vllm.recording import GENERATE, GREEDY, STREAM, send, written

PROMPT = list(range(300, 600))
NOBODY = {"remote_engine_id": "00000000-0000-0000-0000-000000000000", "remote_port": 1}
"""Replaced in the parameters of a hand-over: a prefill server that is not there."""


def exchange(client: httpx2.Client, name: str, **body: Any) -> dict[str, Any]:
    """Send a request and return it with its answer."""
    request = {"name": name, "method": "POST", "path": GENERATE, "headers": {}, "body": {"token_ids": PROMPT, **body}}
    return request | {"answer": send(client, request)}


def prefill(client: httpx2.Client) -> dict[str, Any]:
    """The request for the prompt alone; its answer has the parameters for the decode server."""
    sampling, params = {"max_tokens": 1, **GREEDY}, {"do_remote_decode": True}
    return exchange(client, "prefill", sampling_params=sampling, stream=False, kv_transfer_params=params)


def params_of(prefilled: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in a prefill's answer."""
    params: dict[str, Any] = prefilled["answer"]["json"]["kv_transfer_params"]
    return params


def decode(client: httpx2.Client, name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the answer, with the parameters."""
    sampling = {"max_tokens": 5, **GREEDY}
    return exchange(client, name, sampling_params=sampling, **STREAM, kv_transfer_params=params)


def hand_over(prefill_url: str, decode_url: str) -> list[dict[str, Any]]:
    """A prefill, the decode that takes its blocks, and one whose prefill server is not there."""
    with (
        httpx2.Client(base_url=prefill_url, timeout=90, trust_env=False) as first,
        httpx2.Client(base_url=decode_url, timeout=90, trust_env=False) as second,
    ):
        second.post("/reset_prefix_cache").raise_for_status()
        prefilled = prefill(first)
        taken = decode(second, "decode", params_of(prefilled))
        second.post("/reset_prefix_cache").raise_for_status()
        return [prefilled, taken, decode(second, "decode without its prefill server", params_of(prefilled) | NOBODY)]


if __name__ == "__main__":
    sys.stdout.write(written({"server": "vLLM 0.32.0", "exchanges": hand_over(*sys.argv[1:])}))
