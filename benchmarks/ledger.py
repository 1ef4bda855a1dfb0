"""Ledger: the answer to each request of a replay, beside the answer of an engine that nothing disturbs.

    LoadDriver ──► Ledger ──► graph          requests get a seed of their own, so that no two answers are alike
      ▲────── items, recorded ┘

The answer of a mock engine follows from the request alone. So the answer of an undisturbed engine can be computed, and
an answer that went through several workers is compared with it token by token.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import AsyncGenerator
from itertools import islice

import anyio
from attrs import define, field

from engines.mocker.tokens import Output
from pipeline import Annotated, AsyncEngine, Context, Operator, PenstockError, ResponseStream
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PreprocessedRequest

Item = Annotated[LLMEngineOutput]


@define(eq=False)
class AnswerRecord:
    """One request as it was sent, and its answer."""

    seed: int
    prompt_tokens: int
    first: int
    last: int
    """The first and the last token of its prompt."""
    wanted_tokens: int
    token_ids: range
    tokens: array[int] = field(factory=lambda: array("I"))
    finishes: list[str] = field(factory=list)
    usage: CompletionUsage | None = None
    error: PenstockError | None = None
    is_late: bool = False
    """Whether tokens came after the end."""
    began_s: float = 0.0
    ended_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether its answer ended as complete."""
        return self.error is None and self.finishes == ["length"]

    def undisturbed(self) -> list[int]:
        """Return the answer of an engine to this request when nothing disturbs it."""
        output = Output(self.seed, token_ids=self.token_ids)
        tokens = output.output_source(prompt_tokens=self.prompt_tokens, first=self.first, last=self.last)
        return list(islice(tokens, self.wanted_tokens))

    def problems(self) -> list[str]:
        """Return what is wrong with the answer. A broken answer must be the beginning of the undisturbed one."""
        tokens, whole = self.tokens.tolist(), self.undisturbed()
        found = []
        if tokens != whole[: len(tokens)]:
            at = next(
                (at for at, pair in enumerate(zip(tokens, whole, strict=False)) if len(set(pair)) > 1), len(whole)
            )
            found.append(f"token {at} of {len(whole)} is wrong, {len(tokens)} were delivered")
        if self.ended_s is None:
            found.append("it has not ended")
        if self.is_late:
            found.append("tokens came after the end")
        if self.is_complete:
            found += self._missing(whole)
        elif self.error is None:
            found.append(f"it ended without an error and with {self.finishes}")
        elif self.finishes:
            found.append(f"it failed and has {self.finishes}")
        return found

    def _missing(self, whole: list[int]) -> list[str]:
        """Return what is wrong with the end of a complete answer."""
        found = [] if len(self.tokens) == len(whole) else [f"{len(self.tokens)} tokens of {len(whole)}"]
        counts = None if self.usage is None else (self.usage.prompt_tokens, self.usage.completion_tokens)
        if counts != (self.prompt_tokens, len(whole)):
            found.append(f"the usage is {counts}, not {(self.prompt_tokens, len(whole))}")
        return found


class Ledger(Operator[PreprocessedRequest, Item, PreprocessedRequest, Item]):
    """Keep a record of every request by its id; stands above all. The answers of the engines consist of `token_ids`."""

    def __init__(self, token_ids: range) -> None:
        self.records: dict[str, AnswerRecord] = {}
        self.twice: list[str] = []
        """Ids that were sent more than once."""
        self._token_ids = token_ids

    async def generate(
        self, request: Context[PreprocessedRequest], next: AsyncEngine[PreprocessedRequest, Item]
    ) -> ResponseStream[Item]:
        if request.id in self.records:
            self.twice.append(request.id)
        record = self.records[request.id] = self._record_of(request)
        try:
            stream = await next.generate(request)
        except PenstockError as error:
            record.error, record.ended_s = error, anyio.current_time()
            raise
        return ResponseStream(self._recorded(stream, record), request, stream)

    def _record_of(self, request: Context[PreprocessedRequest]) -> AnswerRecord:
        payload = request.payload
        seed = payload.sampling_options.seed = zlib.crc32(request.id.encode())
        prompt, wanted = payload.token_ids, payload.stop_conditions.max_tokens or 0
        now_s = anyio.current_time()
        return AnswerRecord(seed, len(prompt), prompt[0], prompt[-1], wanted, self._token_ids, began_s=now_s)

    async def _recorded(self, stream: ResponseStream[Item], record: AnswerRecord) -> AsyncGenerator[Item, None]:
        try:
            async with stream:
                async for item in stream:
                    _add(item, record)
                    yield item
        except PenstockError as error:
            record.error = error
            raise
        finally:
            record.ended_s = anyio.current_time()


def _add(item: Item, record: AnswerRecord) -> None:
    record.error = record.error or item.extract_error()
    if (data := item.data) is None:
        return
    if data.token_ids:
        record.is_late = record.is_late or bool(record.finishes) or record.error is not None
        record.tokens.extend(data.token_ids)
    if data.completion_usage is not None:
        record.usage = data.completion_usage
    if data.finish_reason is not None:
        record.finishes.append(str(data.finish_reason))
