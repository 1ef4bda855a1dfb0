"""An SGLang server that is simulated, on the wire of a real one, in virtual time; its two halves meet in rooms."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
from attrs import define, field

from engines.upstream import SglangUpstream
from tests.engines.upstream.wire import Line, Received
from tests.engines.upstream.worlds import Sending, TokenServer, choice_prompts, continued, running, started_on


@define(eq=False)
class Room:
    """Where the two halves of one request meet."""

    there: set[str] = field(factory=set)
    """The halves that are there: prefill, decode."""
    changed: anyio.Event = field(factory=anyio.Event)

    def enter(self, half: str) -> None:
        self.there.add(half)
        self.changed.set()
        self.changed = anyio.Event()

    async def wait(self, half: str) -> None:
        while half not in self.there:
            await self.changed.wait()


Rooms = dict[int, Room]


@define(eq=False)
class FakeSglang(TokenServer):
    """SGLang 0.5.23 on its wire: discovery, tokens, aborts, health."""

    page_size: int = 16
    max_total_num_tokens: int = 8192
    mode: str = "null"
    """`--disaggregation-mode`."""
    rooms: Rooms = field(factory=dict)
    """Shared by the servers of both halves."""
    is_incremental: bool = False
    """`--incremental-streaming-output`."""
    counts: bool = True
    """Whether it counts the tokens of each chunk."""
    info: dict[str, Any] = field(factory=dict)
    """Further values of `/server_info`."""
    prefill_s: float = 0.05
    """Time of a prompt."""
    transfer_timeout_s: float = 300.0
    """How long a half waits for the other."""
    begun: int = 0
    """Requests for tokens so far."""

    async def answer(self, line: Line, received: Received) -> None:
        match received.method, received.path:
            case "GET", "/v1/models":
                await line.whole(200, {"object": "list", "data": self._models()})
            case "GET", "/server_info":
                await line.whole(200, self.server_info())
            case "GET", "/health":
                await line.whole(200 if self.is_healthy else 503, b"")
            case "POST", "/generate":
                await self._generate(line, received.json)
            case "POST", "/abort_request":
                self.abort(received.json["rid"])
                await line.whole(200, b"")
            case _:
                await line.whole(404, {"detail": "Not Found"})

    def server_info(self) -> dict[str, Any]:
        return {
            "model_path": f"/models/{self.model}",
            "page_size": self.page_size,
            "max_total_num_tokens": self.max_total_num_tokens,
            "dp_size": 1,
            "random_seed": int(self.started_s),
            "startup_time": {"scheduler_e2e": self.started_s / 1e9},
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": 8998,
            "incremental_streaming_output": self.is_incremental,
            "kv_events": None,
            "version": "0.5.23",
        } | self.info

    def _models(self) -> list[dict[str, Any]]:
        known = {"owned_by": "sglang", "root": self.model, "parent": None, "max_model_len": self.context_length}
        base = {"id": self.model} | known
        return [
            base,
            *({"id": name, "root": "/a", "parent": self.model, "max_model_len": None} for name in self.adapters),
        ]

    async def _generate(self, line: Line, body: dict[str, Any]) -> None:
        self.begun += 1
        aborted = self.running[body["rid"]] = anyio.Event()
        try:
            await line.begin()
            await self._streamed(Sending(line, self.faults), Asked(body, self), aborted)
            await line.end()
        finally:
            self.running.pop(body["rid"], None)

    async def _streamed(self, sending: Sending, asked: Asked, aborted: anyio.Event) -> None:
        if (refused := self.refusal(asked.prompt)) is not None:
            await sending.put({"error": {"message": refused, "type": "invalid_request_error", "code": 400}})
        elif (failed := await self._met(asked, aborted)) is not None:
            await sending.put(asked.chunk(0, [], failed))
        elif self.mode == "prefill":
            await sending.put(asked.chunk(0, continued(asked.prompt, 1), {"type": "length", "length": 0}))
        else:
            await self._tokens(sending, asked, aborted)
        await sending.put("[DONE]")

    async def _met(self, asked: Asked, aborted: anyio.Event) -> dict[str, Any] | None:
        """Wait for the other half, which this one needs; return a finish reason if that does not come."""
        if self.mode == "null":
            return None
        if asked.body["bootstrap_host"] == "2.2.2.2":
            return None
        other = {"prefill": "decode", "decode": "prefill"}[self.mode]
        room = self.rooms.setdefault(asked.body["bootstrap_room"], Room())
        with anyio.move_on_after(self.transfer_timeout_s):
            if self.mode == "decode":
                room.enter("decode")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_when, aborted, tasks.cancel_scope)
                if self.mode == "prefill":
                    await anyio.sleep(self.prefill_s)
                    room.enter("prefill")
                await room.wait(other)
                tasks.cancel_scope.cancel()
        if aborted.is_set():
            return {"type": "abort", "message": "Abort in waiting queue", "status_code": None}
        if other not in room.there:
            return {"type": "abort", "message": f"KVTransferError: {other} did not come", "status_code": 500}
        return None

    async def _cancel_when(self, aborted: anyio.Event, scope: anyio.CancelScope) -> None:
        await aborted.wait()
        scope.cancel()

    async def _tokens(self, sending: Sending, asked: Asked, aborted: anyio.Event) -> None:
        most = asked.most
        natural = self.answer_tokens(most, asked.min_tokens, ignore_eos=asked.ignore_eos)
        answers = [continued(one, natural) for one in choice_prompts(asked.prompt, asked.n)]
        for begin in range(0, natural, self.tokens_per_chunk):
            is_aborted = await self.step(aborted)
            done = min(begin + self.tokens_per_chunk, natural)
            for index, answer in enumerate(answers):
                if is_aborted:
                    await sending.put(asked.chunk(index, answer[:begin], {"type": "abort", "message": "Abort"}, begin))
                    continue
                await sending.put(asked.chunk(index, answer[:done], _reason(done, natural, most), begin))
            if is_aborted:
                return


def _reason(done: int, natural: int, most: int) -> dict[str, Any] | None:
    if done < natural:
        return None
    return {"type": "length", "length": most} if natural == most else {"type": "stop", "matched": 2}


@define(eq=False)
class Asked:
    """A request for tokens."""

    body: dict[str, Any]
    server: FakeSglang

    @property
    def prompt(self) -> list[int]:
        return list(self.body["input_ids"])

    @property
    def _sampling(self) -> dict[str, Any]:
        return dict(self.body["sampling_params"])

    @property
    def n(self) -> int:
        return int(self._sampling.get("n", 1))

    @property
    def most(self) -> int:
        room = self.server.context_length - len(self.prompt)
        limit = self._sampling.get("max_new_tokens", 128)
        return room if limit is None else min(limit, room)

    @property
    def min_tokens(self) -> int:
        return int(self._sampling.get("min_new_tokens", 0))

    @property
    def ignore_eos(self) -> bool:
        return bool(self._sampling.get("ignore_eos", False))

    def chunk(self, index: int, ids: list[int], reason: dict[str, Any] | None, seen: int = 0) -> dict[str, Any]:
        """A chunk with all ids of a choice so far, of which the first `seen` were sent."""
        new = ids[seen:] if self.server.is_incremental else ids
        meta = {
            "id": self.body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(self.prompt),
            "cached_tokens": 0,
            "dp_rank": 0,
        }
        if self.server.counts:
            meta["completion_tokens"] = len(ids)
        if self.body.get("return_logprob"):
            top = range(self.body["top_logprobs_num"])
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in new]
            meta["output_top_logprobs"] = [
                [[-0.5 * (1 + place), token + place, None] for place in top] for token in new
            ]
        chunk = {"text": None, "output_ids": new, "meta_info": meta}
        return chunk | ({"index": index} if self.n > 1 else {})


fake_sglang = partial(running, FakeSglang)
started_sglang = partial(started_on, SglangUpstream)
