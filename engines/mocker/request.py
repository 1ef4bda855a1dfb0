"""RequestPlan: the answer to a request, decided before anything is scheduled.

Source: dynamo lib/mocker/src/engine_adapter.rs. Other than there, a request may have several choices and no limit.

RecordedOutputs: answers from a trace, found by request.

    {"session_id": "s", "output_length": 3, "output_token_ids": [5, 6, 7]}     a line; its name is `s:0`

Source: dynamo lib/llm/src/mocker.rs, ResponseReplayTable. Other than there, a request is also found by its own
id, a request for an unknown answer is refused, and a migrated request gets only the rest of its answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from attrs import frozen

from pipeline import InvalidArgument, wire
from pipeline.llm import hash_seed
from pipeline.protocols import PreprocessedRequest, StopConditions

from ..roles import is_prefilled_elsewhere
from .args import MockEngineArgs, WorkerType
from .scheduling import Sequence
from .tokens import TOKEN_IDS, TOP_MAX, Output

ANNOTATION = "output_replay_id"
"""`output_replay_id:NAME` among a request's annotations selects the answer of that name."""

_FIELD = "response_replay_trace_path"
_TOKEN_END = 2**32


@frozen
class RecordedOutputs:
    """Answers by name: of a row's `request_id`, else `session:turn`, else `line:N`; turns and lines count from 0.

    Rows without `output_token_ids` have no answer, but count as turns.
    """

    by_name: Mapping[str, Items[int]]

    @classmethod
    def load(cls, path: str | Path) -> RecordedOutputs:
        """Read a file of JSON lines.

        Raises InvalidArgument for a file that cannot be read or has no answer, and, naming the line (from 1), for one
        that is not such a row, whose `output_length` is not the number of tokens, that has no tokens, or whose name is
        taken.
        """
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise InvalidArgument(f"cannot read {path}: {error}", field=_FIELD, cause=error) from error
        by_name = _read(lines)
        if not by_name:
            raise InvalidArgument(f"{path} has no row with output_token_ids", field=_FIELD)
        return cls(by_name)

    def find(self, request: PreprocessedRequest, request_id: str) -> Items[int] | None:
        """Return the answer with the name in the request's annotation, else with the request's id; None if none has it.

        Raises InvalidArgument for an annotation with an unknown name.
        """
        wanted = request.get_annotation_value(ANNOTATION)
        if wanted is not None and wanted not in self.by_name:
            raise InvalidArgument(f"there is no recorded output {wanted!r}", field="annotations")
        return self.by_name.get(request_id if wanted is None else wanted)


def remaining_output(recorded: Items[int], request: PreprocessedRequest) -> Items[int]:
    """Return the part of an answer that is not at the end of the prompt already, as of a migrated request.

    A limit of exactly the rest shows how much that is. Without one, a request with a migration link is taken to have
    emitted as much as the end of its prompt allows.
    """
    prompt, limit = request.token_ids, request.stop_conditions.max_tokens
    exactly = -1 if limit is None else len(recorded) - limit
    if 0 <= exactly <= len(prompt) and list(prompt[len(prompt) - exactly :]) == list(recorded[:exactly]):
        return recorded[exactly:]
    if request.migration_link is None:
        return recorded
    for emitted in range(min(len(recorded), len(prompt)), 0, -1):
        if list(prompt[-emitted:]) == list(recorded[:emitted]):
            return recorded[emitted:]
    return recorded


def _read(lines: Iterable[bytes]) -> dict[str, Items[int]]:
    turns: Counter[str] = Counter()
    by_name: dict[str, Items[int]] = {}
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            name, tokens = _row(wire.from_json(line, dict[str, Any]), index, turns)
            if tokens is None:
                continue
            if name in by_name:
                raise InvalidArgument(f"there is a row of the name {name!r} already")
        except InvalidArgument as error:
            raise InvalidArgument(f"line {index + 1}: {error}", field=_FIELD, cause=error) from error
        by_name[name] = tokens
    return by_name


def _row(row: Mapping[str, Any], index: int, turns: Counter[str]) -> tuple[str, Items[int] | None]:
    """Return the name of a row and its tokens, if any; `turns` counts the rows of each session so far."""
    request_id, session = _text(row, "request_id"), _text(row, "session_id")
    name = request_id or (f"{session}:{turns[session]}" if session else f"line:{index}")
    if session:
        turns[session] += 1
    if (tokens := row.get("output_token_ids")) is None:
        return name, None
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < _TOKEN_END for token in tokens):
        raise InvalidArgument("output_token_ids is not a list of token ids")
    if not tokens:
        raise InvalidArgument("a recorded output has at least one output token")
    lengths = [row[key] for key in ("output_length", "output_tokens") if row.get(key) is not None]
    if lengths != [len(tokens)]:
        declared = " and ".join(map(str, lengths)) or "missing"
        raise InvalidArgument(f"output_length is {declared}, there are {len(tokens)} output_token_ids")
    return name, tokens


def _text(row: Mapping[str, Any], key: str) -> str:
    """Return the text without surrounding white space; empty if there is none."""
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"{key} is not a text")
    return (value or "").strip()


DEFAULT_OUTPUT_TOKENS = 16
"""Length of an answer without a limit."""

_CHOICE_SEED = 0x9E3779B97F4A7C15
_U64 = 2**64


@frozen
class RequestPlan:
    """The answer that a request gets unless it is ended: choices of the same length from one prompt."""

    prompt: Items[int]
    output_tokens: int
    outputs: tuple[Output, ...]
    """The tokens of each choice."""
    hash_seed: int
    logprobs: int | None
    """How many other candidates come with each token; None: no log probabilities."""
    pays_prompt: bool = False
    """Whether the prompt takes time even on a decode worker, since no prefill worker computes it."""

    @property
    def candidates(self) -> int:
        """How many tokens with log probabilities come for each one."""
        return 0 if self.logprobs is None else 1 + min(self.logprobs, TOP_MAX)

    def sequences(self, block_size: int, dp_rank: int) -> list[Sequence]:
        """Return a new sequence for each choice."""
        return [
            Sequence(
                self.prompt,
                self.output_tokens,
                block_size=block_size,
                owner=index,
                output=output,
                dp_rank=dp_rank,
                hash_seed=self.hash_seed,
            )
            for index, output in enumerate(self.outputs)
        ]


def plan_request(
    request: PreprocessedRequest,
    args: MockEngineArgs,
    *,
    token_ids: range | None = None,
    recorded: Items[int] | None = None,
) -> RequestPlan:
    """Return the plan of the answer. `recorded` are its tokens if they are known: a limit cuts them, and a migrated
    request gets the rest of them. Made-up tokens are from `token_ids`.

    Raises InvalidArgument, naming the field, for what cannot be answered.
    """
    if request.prompt_embeds is not None:
        raise InvalidArgument("a mock engine has no use for embeddings", field="prompt_embeds")
    if not request.token_ids:
        raise InvalidArgument("the prompt has no tokens", field="token_ids")
    options, stop, routing = request.sampling_options, request.stop_conditions, request.routing
    choices = 1 if options.n is None else options.n
    if choices < 1:
        raise InvalidArgument(f"n must be at least 1, got {choices}", field="n")
    if recorded is not None:
        if not recorded:
            raise InvalidArgument("a recorded answer has at least one output token", field="output_token_ids")
        recorded = remaining_output(recorded, request)
    wanted = _output_tokens(stop, args.worker_type, recorded)
    seed = (options.seed or 0) % _U64
    outputs = [
        _output(args, wanted, (seed + choice * _CHOICE_SEED) % _U64, token_ids, recorded) for choice in range(choices)
    ]
    adapter, namespace = (None, None) if routing is None else (routing.lora_name, routing.cache_namespace)
    return RequestPlan(
        request.token_ids,
        wanted,
        tuple(outputs),
        hash_seed(adapter, namespace),
        request.output_options.logprobs,
        pays_prompt=not is_prefilled_elsewhere(request),
    )


def _output_tokens(stop: StopConditions, worker_type: WorkerType, recorded: Items[int] | None) -> int:
    """Return the length of the answer, unless it is ended."""
    wanted = 1 if worker_type == "prefill" else stop.max_tokens
    if recorded is not None:
        return len(recorded) if wanted is None else min(wanted, len(recorded))
    return max(DEFAULT_OUTPUT_TOKENS, stop.min_tokens or 0) if wanted is None else wanted


def _output(
    args: MockEngineArgs, output_tokens: int, seed: int, token_ids: range | None, recorded: Items[int] | None
) -> Output:
    if recorded is not None:
        return Output(seed, planned=recorded)
    token_ids = TOKEN_IDS if token_ids is None else token_ids
    if args.reasoning is None:
        return Output(seed, token_ids=token_ids)
    return Output.thought(args.reasoning, output_tokens, seed=seed, token_ids=token_ids)


def checked_rank(request: PreprocessedRequest, args: MockEngineArgs) -> int | None:
    """Return the rank named in the request, or None. Raises InvalidArgument for a rank that does not exist."""
    if request.routing is None:
        return None
    rank = request.routing.dp_rank
    if args.worker_type == "prefill" and request.routing.prefill_dp_rank is not None:
        rank = request.routing.prefill_dp_rank
    if rank is not None and rank >= args.dp_size:
        raise InvalidArgument(f"there is no rank {rank}, only {args.dp_size}", field="dp_rank")
    return rank
