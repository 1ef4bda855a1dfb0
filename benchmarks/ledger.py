"""Ledger: what each request of a replay was told, beside what it would have been told had nothing happened.

    LoadDriver ──► Ledger ──► graph          requests get a seed of their own, so that no two answers are alike
      ▲────── items, noted ──┘

What a mock engine says follows from the request alone. So the answer of an undisturbed engine can be computed, and an
answer that went through several workers is compared with it token by token.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import AsyncGenerator
from itertools import islice

import anyio
from attrs import define, field

from engines.mocker import Output
from pipeline import Annotated, AsyncEngine, Context, Operator, PenstockError, ResponseStream
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PreprocessedRequest

Item = Annotated[LLMEngineOutput]


@define(eq=False)
class Told:
    """One request as it was sent, and all that was said to it."""

    seed: int
    prompt_tokens: int
    first: int
    last: int
    """The first and the last token of its prompt."""
    wanted_tokens: int
    token_ids: range
    said: array[int] = field(factory=lambda: array("I"))
    finishes: list[str] = field(factory=list)
    usage: CompletionUsage | None = None
    error: PenstockError | None = None
    is_late: bool = False
    """Whether tokens came behind the end."""
    began_s: float = 0.0
    ended_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it says itself that it was answered to its end."""
        return self.error is None and self.finishes == ["length"]

    def undisturbed(self) -> list[int]:
        """What an engine says to this request when nothing happens to it."""
        output = Output(self.seed, token_ids=self.token_ids)
        speech = output.speech(prompt_tokens=self.prompt_tokens, first=self.first, last=self.last)
        return list(islice(speech, self.wanted_tokens))

    def problems(self) -> list[str]:
        """What may not be, whichever way it ended: of a broken answer, what was said is the beginning of the whole."""
        said, whole = self.said.tolist(), self.undisturbed()
        found = []
        if said != whole[: len(said)]:
            at = next((at for at, pair in enumerate(zip(said, whole, strict=False)) if len(set(pair)) > 1), len(whole))
            found.append(f"token {at} of {len(whole)} is wrong, {len(said)} were said")
        if self.ended_s is None:
            found.append("it has not ended")
        if self.is_late:
            found.append("tokens came behind the end")
        if self.is_complete:
            found += self._missing(whole)
        elif self.error is None:
            found.append(f"it ended without an error and with {self.finishes}")
        elif self.finishes:
            found.append(f"it failed and has {self.finishes}")
        return found

    def _missing(self, whole: list[int]) -> list[str]:
        """What is wrong with the end of an answer that says it is complete."""
        found = [] if len(self.said) == len(whole) else [f"{len(self.said)} tokens of {len(whole)}"]
        counts = None if self.usage is None else (self.usage.prompt_tokens, self.usage.completion_tokens)
        if counts != (self.prompt_tokens, len(whole)):
            found.append(f"the usage is {counts}, not {(self.prompt_tokens, len(whole))}")
        return found


class Ledger(Operator[PreprocessedRequest, Item, PreprocessedRequest, Item]):
    """Stands above all, and keeps every request under its id. `token_ids` is what the engines' answers consist of."""

    def __init__(self, token_ids: range) -> None:
        self.told: dict[str, Told] = {}
        self.twice: list[str] = []
        """Those that were sent more than once."""
        self._token_ids = token_ids

    async def generate(
        self, request: Context[PreprocessedRequest], next: AsyncEngine[PreprocessedRequest, Item]
    ) -> ResponseStream[Item]:
        if request.id in self.told:
            self.twice.append(request.id)
        told = self.told[request.id] = self._entry(request)
        try:
            stream = await next.generate(request)
        except PenstockError as error:
            told.error, told.ended_s = error, anyio.current_time()
            raise
        return ResponseStream(self._noted(stream, told), request, stream)

    def _entry(self, request: Context[PreprocessedRequest]) -> Told:
        payload = request.payload
        seed = payload.sampling_options.seed = zlib.crc32(request.id.encode())
        prompt, wanted = payload.token_ids, payload.stop_conditions.max_tokens or 0
        now_s = anyio.current_time()
        return Told(seed, len(prompt), prompt[0], prompt[-1], wanted, self._token_ids, began_s=now_s)

    async def _noted(self, stream: ResponseStream[Item], told: Told) -> AsyncGenerator[Item, None]:
        try:
            async with stream:
                async for item in stream:
                    _note(item, told)
                    yield item
        except PenstockError as error:
            told.error = error
            raise
        finally:
            told.ended_s = anyio.current_time()


def _note(item: Item, told: Told) -> None:
    told.error = told.error or item.extract_error()
    if (data := item.data) is None:
        return
    if data.token_ids:
        told.is_late = told.is_late or bool(told.finishes) or told.error is not None
        told.said.extend(data.token_ids)
    if data.completion_usage is not None:
        told.usage = data.completion_usage
    if data.finish_reason is not None:
        told.finishes.append(str(data.finish_reason))
