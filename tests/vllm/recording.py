"""What a vLLM server really answers, as records that the fakes of the normal suite are held to.

    .venv/bin/python -m tests.vllm.recording URL > tests/engines/upstream/recorded/vllm.json
    .venv/bin/python -m tests.vllm.recording URL kv_events > tests/engines/upstream/recorded/vllm_byte_hashes.json

writes the answers to `REQUESTS` and the KV events of the server, or only the latter. `test_recorded_wire.py` sends
every recorded request to the installed vLLM again and compares the answers by `fits`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import httpx2
import msgspec
import zmq

PROMPT = list(range(300, 370))
"""Two full blocks of 32 and the beginning of a third."""
GREEDY = {"temperature": 0, "ignore_eos": True}
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_tokens": 4000}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


def _generate(**fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 3, **GREEDY} | fields.pop("sampling_params", {})
    return {"token_ids": PROMPT, "sampling_params": sampling, **STREAM, **fields}


def _complete(**fields: Any) -> dict[str, Any]:
    own = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    return own | STREAM | fields


REQUESTS: tuple[tuple[str, str, str, Mapping[str, Any] | None, Mapping[str, str]], ...] = (
    ("models", "GET", "/v1/models", None, {}),
    ("version", "GET", "/version", None, {}),
    ("kv event sources", "GET", "/kv_event_sources", None, {}),
    ("health", "GET", "/health", None, {}),
    ("stream", "POST", GENERATE, _generate(request_id="r1"), {}),
    ("not streaming", "POST", GENERATE, _generate(request_id="r2", stream=False, stream_options=None), {}),
    ("logprobs", "POST", GENERATE, _generate(sampling_params={"logprobs": 2}), {}),
    ("two choices", "POST", GENERATE, _generate(sampling_params={"n": 2, "temperature": 1.0, "seed": 3}), {}),
    ("stop token", "POST", GENERATE, _generate(sampling_params={"stop_token_ids": list(range(8192))}), {}),
    ("guided", "POST", GENERATE, _generate(sampling_params={"structured_outputs": {"choice": ["no"]}}), {}),
    ("salt and session", "POST", GENERATE, _generate(cache_salt="dynamo-cache-salt:a"), {"X-Session-ID": "s1"}),
    ("rank", "POST", GENERATE, _generate(), {"X-data-parallel-rank": "0"}),
    ("no such rank", "POST", GENERATE, _generate(), {"X-data-parallel-rank": "9"}),
    ("token out of vocabulary", "POST", GENERATE, _generate(token_ids=[99999]), {}),
    (
        "token out of vocabulary, not streaming",
        "POST",
        GENERATE,
        _generate(token_ids=[99999], stream=False, stream_options=None),
        {},
    ),
    ("prompt too long", "POST", GENERATE, _generate(token_ids=[5]), {}),
    ("no tokens", "POST", GENERATE, _generate(token_ids=[]), {}),
    ("unknown model", "POST", GENERATE, _generate(model="other"), {}),
    ("bad option", "POST", GENERATE, _generate(sampling_params={"temperature": -1}), {}),
    ("salt not allowed", "POST", GENERATE, _generate(cache_salt="a/b"), {}),
    ("abort without the prefix", "POST", "/inference/v1/abort_requests", {"request_ids": ["none"]}, {}),
    ("completions", "POST", COMPLETIONS, _complete(), {}),
    ("completions with logprobs", "POST", COMPLETIONS, _complete(logprobs=1), {}),
    ("completions, not streaming", "POST", COMPLETIONS, _complete(stream=False, stream_options=None), {}),
    ("completions, token out of vocabulary", "POST", COMPLETIONS, _complete(prompt=[99999]), {}),
    ("completions, unknown model", "POST", COMPLETIONS, _complete(model="other"), {}),
    ("tokenize", "POST", "/tokenize", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}, {}),
    (
        "render",
        "POST",
        "/v1/chat/completions/render",
        {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
        {},
    ),
    ("no such route", "GET", "/server_info_of_others", None, {}),
)
"""Name, method, path, body and headers of each recorded request."""


def events_of(text: str) -> list[Any]:
    """The data of server-sent events, parsed; the last one is the text `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def answer_of(response: httpx2.Response) -> dict[str, Any]:
    """Status, content type and body: `events` of a stream, else `json`, else `text`."""
    kind = response.headers.get("content-type")
    answer: dict[str, Any] = {"status": response.status_code, "content_type": kind}
    if kind and kind.startswith("text/event-stream"):
        return answer | {"events": events_of(response.text)}
    if kind == "application/json":
        return answer | {"json": response.json()}
    return answer | {"text": response.text}


def send(client: httpx2.Client, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send a recorded request and return its answer. `abort_after` sends an abort after so many events,
    `prompt_times` repeats the prompt."""
    method, path, body, headers = (request[name] for name in ("method", "path", "body", "headers"))
    if "prompt_times" in request:
        body = {**body, "token_ids": body["token_ids"] * request["prompt_times"]}
    if "abort_after" not in request:
        return answer_of(client.request(method, path, json=body, headers=headers))
    events: list[Any] = []
    with client.stream(method, path, json=body, headers=headers) as response:
        for line in response.iter_lines():
            events += events_of(line)
            if len(events) == request["abort_after"]:
                client.post("/inference/v1/abort_requests", json={"request_ids": [request["abort_id"]]})
        kind = response.headers.get("content-type")
    # The middle differs from run to run: the first event, and from the last before the end on.
    return {"status": response.status_code, "content_type": kind, "events": [events[0], *events[-3:]]}


def requests() -> Iterator[dict[str, Any]]:
    """Every request to record."""
    for name, method, path, body, headers in REQUESTS:
        times = {"prompt_times": 8193} if name == "prompt too long" else {}
        yield {"name": name, "method": method, "path": path, "headers": dict(headers), "body": body, **times}
    body = _generate(request_id="r3", sampling_params=ENDLESS)
    aborted = {"name": "aborted", "method": "POST", "path": GENERATE, "headers": {}, "body": body}
    yield aborted | {"abort_after": 5, "abort_id": "generate-tokens-r3"}


def fits(value: Any, recorded: Any) -> bool:
    """Return whether an answer has the form of the recorded one: the same keys and types, any element of a list like
    one of the recorded list. A server under load sends several tokens in one chunk, so fewer elements are fine."""
    if isinstance(value, Mapping) and isinstance(recorded, Mapping):
        return value.keys() == recorded.keys() and all(fits(each, recorded[name]) for name, each in value.items())
    if isinstance(value, list) and isinstance(recorded, list):
        return all(any(fits(each, other) for other in recorded) for each in value) and bool(value) == bool(recorded)
    return type(value) is type(recorded)


# -- KV events


def _record_of(frames: Sequence[bytes]) -> dict[str, Any]:
    """The frames as hex, and what the payload means to a reader."""
    *_, payload = frames
    return {
        "frames": [frame.hex() for frame in frames],
        "decoded": _readable(msgspec.msgpack.decode(payload)) if payload else None,
    }


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if isinstance(value, list):
        return [_readable(each) for each in value]
    return {name: _readable(each) for name, each in value.items()} if isinstance(value, dict) else value


def replay(endpoint: str, first: int) -> list[dict[str, Any]]:
    """Every batch that the server keeps from the sequence number on, and the end mark."""
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with closing(dealer):
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        records = []
        while dealer.poll(5000):
            frames = dealer.recv_multipart()
            records.append(_record_of(frames))
            if frames[-2] == b"\xff" * 8:
                return records
        raise TimeoutError("no end mark")


def published(endpoint: str, client: httpx2.Client) -> list[dict[str, Any]]:
    """What the server publishes while it answers a prompt after it has forgotten all others, and then forgets it."""
    client.post("/reset_prefix_cache").raise_for_status()
    subscriber: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    with closing(subscriber):
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(endpoint)
        time.sleep(0.5)
        fresh = _generate(token_ids=list(range(1000, 1070)), sampling_params={"max_tokens": 30})
        client.post(GENERATE, json=fresh).raise_for_status()
        client.post("/reset_prefix_cache").raise_for_status()
        # Only a step of the scheduler sends that all is cleared.
        client.post(GENERATE, json=_generate(token_ids=list(range(1100, 1140)))).raise_for_status()
        records = []
        while subscriber.poll(1000):
            records.append(_record_of(subscriber.recv_multipart()))
        return records


def local(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def _kv_events(client: httpx2.Client) -> dict[str, Any]:
    source = client.get("/kv_event_sources").raise_for_status().json()["0"]
    live = published(local(source["endpoint"]), client)
    return {"kv_events": live, "kv_replay": replay(local(source["replay_endpoint"]), 0)}


def _metrics(client: httpx2.Client) -> list[str]:
    """The lines of metrics that discovery and load read."""
    names = ("vllm:num_requests", "vllm:kv_cache_usage", "vllm:cache_config", "vllm:prefix_cache")
    lines = client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith(names) and "_created" not in line]


def main(url: str, *parts: str) -> None:
    with httpx2.Client(base_url=url, timeout=60, trust_env=False) as client:
        record: dict[str, Any] = {"server": f"vLLM {client.get('/version').json()['version']}"}
        root = client.get("/v1/models").json()["data"][0]["root"]
        if not parts:
            record["exchanges"] = [request | {"answer": send(client, request)} for request in requests()]
        record |= _kv_events(client)
        if not parts:
            record["metrics"] = _metrics(client)
    sys.stdout.write(written(record).replace(root, "/models/tiny"))


def written(record: Mapping[str, Any]) -> str:
    """The record as JSON, with each element of a list on a line of its own."""
    parts = []
    for name, value in record.items():
        lines = ",\n  ".join(json.dumps(each) for each in value) if isinstance(value, list) else None
        parts.append(f" {json.dumps(name)}: " + (json.dumps(value) if lines is None else f"[\n  {lines}\n ]"))
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
