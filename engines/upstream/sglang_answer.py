"""SglangAnswer: makes chunks of the bytes of a streamed answer of SGLang's `/generate`.

    {"output_ids": [5, 6], "meta_info": {"completion_tokens": 2, "finish_reason": null, ...}} ──► chunk of what is new

A server sends with each chunk either all ids so far or only those that are new, by an option of its own. Its count of
the tokens so far shows which: both forms fit the same count only where they are the same.

Source: sglang/srt/managers/tokenizer_manager.py, TokenizerManager._handle_batch_output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import PenstockError
from pipeline.errors import BackendUnknown, EngineShutdown, InvalidMessage, TransferFailed
from pipeline.protocols import FinishReason, LLMEngineOutput, PromptTokensDetails, TopLogprob

from .errors import excerpt, of_frame
from .streamed_answer import StreamedAnswer, checked_ids, join

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class SglangAnswer(StreamedAnswer):
    """The answer to one request, while its bytes arrive. The chunks that came together are joined, see `join`.

    `choices` and `prompt_tokens` are those of the request. `is_incremental`: which form the chunks have, for a server
    that does not count the tokens. `handed_over` goes into the first chunk, as the parameters for a decode worker.
    `is_half`: whether another server has the other half of the request; a failure before the first token is then
    TransferFailed.
    Every method raises as those of StreamedAnswer; also the error of a failed choice; InvalidMessage for tokens that
    were lost or repeated; EngineShutdown if the server gave the answer up.
    """

    def __init__(
        self,
        choices: int,
        prompt_tokens: int,
        *,
        is_incremental: bool | None = None,
        handed_over: Mapping[str, Any] | None = None,
        is_half: bool = False,
    ) -> None:
        super().__init__(prompt_tokens)
        self._choices = choices
        self._is_incremental, self._handed_over, self._is_half = is_incremental, handed_over, is_half
        self._seen, self._newest = [0] * choices, [-1] * choices
        self._open = set(range(choices))

    def _read(self, data: str | bytes, outputs: list[LLMEngineOutput]) -> None:
        if self.is_done:
            return  # behind the last chunk there is only the end
        chunk = self._object(data)
        try:
            meta = chunk.get("meta_info") or {}
            reason = meta.get("finish_reason")
        except AttributeError as wrong:
            raise self._invalid(data, wrong) from wrong
        if reason is not None and _kind(reason) == "abort":
            raise self._given_up(reason)
        try:
            output = self._output(chunk, meta)
            if reason is not None:
                self._close(output, reason)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as wrong:
            raise self._invalid(data, wrong) from wrong
        if output.token_ids or reason is not None:
            join(outputs, output)

    def _output(self, chunk: Mapping[str, Any], meta: Mapping[str, Any]) -> LLMEngineOutput:
        """Return the chunk of one choice, without its finish reason."""
        index = chunk.get("index") or 0
        if index not in self._open:
            raise InvalidMessage(f"a chunk of choice {index}, which has ended or was not requested")
        new = self._new(index, chunk["output_ids"], meta.get("completion_tokens"))
        if new:
            self._seen[index] += len(new)
            self.tokens += len(new)
            self._newest[index] = new[-1]
        if (cached := meta.get("cached_tokens")) is not None and self._details is None:
            self._details = PromptTokensDetails(cached_tokens=int(cached))
        output = LLMEngineOutput(new)
        if new and meta.get("output_token_logprobs") is not None:
            _add_logprobs(output, meta)
        if self._choices > 1:
            output.index = index
        if self._handed_over is not None:
            output.disaggregated_params, self._handed_over = dict(self._handed_over), None
        return output

    def _new(self, index: int, ids: Any, counted: Any) -> list[int]:
        """Return the ids that are new, by the server's count of the tokens so far. Raise InvalidMessage if the ids fit
        it in neither form, or are no ids."""
        if type(ids) is not list:
            raise TypeError("expected a list of token ids")
        seen = self._seen[index]
        if counted is None:  # no count to go by
            counted = seen + len(ids) if self._is_incremental else len(ids)
        if len(ids) == counted - seen:
            new = ids
        elif len(ids) == counted and counted >= seen:
            if ids[seen - 1] != self._newest[index]:
                raise InvalidMessage(f"the server sent {excerpt(str(ids))} behind another token")
            new = ids[seen:]
        else:
            raise InvalidMessage(f"the server counted {counted} tokens, of which {seen} were here, and sent {len(ids)}")
        return checked_ids(new)

    def _close(self, output: LLMEngineOutput, reason: Any) -> None:
        """Make the chunk the terminal one of its choice."""
        output.finish_reason = _REASONS.get(_kind(reason), FinishReason.STOP)
        matched = reason.get("matched") if isinstance(reason, Mapping) else None
        if type(matched) in (int, str):
            output.stop_reason = matched
        self._open.discard(output.index or 0)
        if not self._open:
            output.completion_usage, self.is_done = self.usage, True

    def _given_up(self, reason: Any) -> PenstockError:
        """Return the error of a choice that the server has not finished."""
        plain = reason if isinstance(reason, Mapping) else {}
        text = plain.get("message") or "aborted"
        if (code := plain.get("status_code")) is None:
            return EngineShutdown(f"the server gave the answer up after {self.tokens} tokens: {text}")
        error = of_frame({"message": text, "code": code}, has_tokens=self.tokens > 0)
        if self._is_half and not self.tokens and isinstance(error, BackendUnknown):
            return TransferFailed(f"the two halves of the request did not come together: {text}", cause=error)
        return error


def _kind(reason: Any) -> str:
    """Return the finish reason's name, which older servers send alone."""
    return str(reason.get("type")) if isinstance(reason, Mapping) else str(reason)


def _add_logprobs(output: LLMEngineOutput, meta: Mapping[str, Any]) -> None:
    """Add the log probabilities of the chunk's tokens: the last ones, in both forms of an answer."""
    count = len(output.token_ids)
    entries: Sequence[Sequence[Any]] = meta["output_token_logprobs"][-count:]
    if [entry[1] for entry in entries] != output.token_ids:
        raise InvalidMessage(f"{count} tokens came with log probabilities of others")
    output.log_probs = [float(entry[0]) for entry in entries]
    top: Sequence[Sequence[Sequence[Any]] | None] = (meta.get("output_top_logprobs") or [])[-count:]
    if any(top):
        output.top_logprobs = [[*_ranked(candidates or ())] for candidates in top]


def _ranked(candidates: Sequence[Sequence[Any]]) -> list[TopLogprob]:
    ordered = sorted(candidates, key=lambda one: -float(one[0]))
    return [TopLogprob(place, one[1], float(one[0])) for place, one in enumerate(ordered, 1)]
