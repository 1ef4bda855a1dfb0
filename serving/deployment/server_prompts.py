"""Prompts of a model whose tokenizer is at its servers only.

ServerPrompts: has one of the servers make tokens of a prompt.
PromptServer: such a server, of this process or of a worker.
ServerTokenizer: stands for that tokenizer where a model needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import anyio
from attrs import evolve

from operators import Model
from operators.text import begins_answer, raw_prompt, template_args, validate
from pipeline import (
    AsyncEngine,
    Cancelled,
    Context,
    InvalidArgument,
    Operator,
    PenstockError,
    ResponseStream,
    Unavailable,
)
from pipeline.errors import CodecError, TransportError
from pipeline.protocols.limits import RequestLimits
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest, NvExt
from pipeline.wire import to_plain

Request = ChatCompletionRequest | CompletionRequest


class PromptServer(Protocol):
    """What has the tokenizer of a model."""

    async def prompt_tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a prompt: `prompt`, or `messages` with what belongs to the chat template.

        Raise a TransportError if the server cannot be reached, and what it refuses the prompt with.
        """
        ...


class ServerPrompts(Operator[Request, Any, Request, Any]):
    """Has a server of the model make tokens of each prompt.

        request ──► POST /tokenize ──► with the ids in `nvext.token_data`
        stream  ◄── unchanged      ◄──

    Stands above Preprocess, which then reads no text. Prompts of token ids, and requests with `token_data`, pass
    unchanged. `servers` returns the servers that are there now; they take turns, and the next one is tried if one
    cannot be reached. Raises InvalidArgument as `validate`, what a server refuses a prompt with, Unavailable if none is
    there, and Cancelled on a stop or kill meanwhile, which ends the wait.
    """

    def __init__(
        self, servers: Callable[[], Sequence[PromptServer]], limits: RequestLimits, *, ignore_unsupported: bool
    ) -> None:
        self._servers, self._limits, self._ignore_unsupported = servers, limits, ignore_unsupported
        self._turn = 0

    async def generate(self, request: Context[Request], next: AsyncEngine[Request, Any]) -> ResponseStream[Any]:
        payload = request.payload
        validate(payload, ignore_unsupported=self._ignore_unsupported, limits=self._limits)
        if (wanted := _wanted(payload)) is None:
            return await next.generate(request)
        token_ids: list[int] | None = None
        with anyio.CancelScope() as scope:
            forget = request.control.on_stop(scope.cancel)
            try:
                token_ids = await self._tokenized(wanted)
            finally:
                forget()
        if token_ids is None:
            raise Cancelled(f"Request {request.id} was cancelled")
        nvext = evolve(payload.nvext or NvExt(), token_data=token_ids)
        return await next.generate(request.with_payload(evolve(payload, nvext=nvext)))

    async def _tokenized(self, wanted: Mapping[str, Any]) -> list[int]:
        servers, self._turn = list(self._servers()), self._turn + 1
        failure: PenstockError = Unavailable("no server of the model is there")
        for place in range(len(servers)):
            server = servers[(self._turn + place) % len(servers)]
            try:
                return await server.prompt_tokens(wanted)
            except TransportError as error:
                failure = Unavailable(f"no server of the model takes prompts: {error}", cause=error)
        raise failure


def _wanted(payload: Request) -> dict[str, Any] | None:
    """Return what a server makes tokens of; None for a prompt that is tokens already."""
    if payload.nvext is not None and payload.nvext.token_data is not None:
        return None
    if isinstance(payload, ChatCompletionRequest):
        raw = raw_prompt(payload)
        return _of_chat(payload) if raw is None else {"prompt": raw}
    if isinstance(payload.prompt, str):
        return {"prompt": payload.prompt}
    texts = [one for one in payload.prompt or () if isinstance(one, str)]
    if not texts:
        return None
    if len(texts) > 1:
        raise InvalidArgument("one prompt at a time", field="prompt")
    return {"prompt": texts[0]}


def _of_chat(payload: ChatCompletionRequest) -> dict[str, Any]:
    """Return what the server renders, as Preprocess would. Raise InvalidArgument as it does."""
    wanted: dict[str, Any] = {
        "messages": to_plain(payload.messages),
        "add_generation_prompt": begins_answer(payload),
    }
    if payload.continue_final_message:
        wanted["continue_final_message"] = True
    if payload.tools and payload.tool_choice != "none":
        wanted["tools"] = to_plain(payload.tools)
    if args := template_args(payload):
        wanted["chat_template_kwargs"] = args
    return wanted


def model_at_servers(name: str) -> Model:
    """Return a model whose tokenizer and chat template are at its servers only."""
    return Model(name, ServerTokenizer(), checks_token_ids=False)


def has_text_at_servers(model: Model) -> bool:
    """Return whether that is such a model."""
    return isinstance(model.tokenizer, ServerTokenizer)


class ServerTokenizer:
    """The tokenizer of a server, for stages that have the tokens of prompts and the texts of answers from there."""

    def encode(self, text: str) -> list[int]:
        raise CodecError("the tokenizer is at the server")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        raise CodecError("the tokenizer is at the server")

    def decoder(self, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> NoText:
        return NoText()

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_id(self, token: str) -> int | None:
        return None

    def first_unknown(self, token_ids: Sequence[int]) -> int | None:
        return None


class NoText:
    """A decoder for answers whose texts come with their tokens."""

    def step(self, token_id: int) -> str:
        raise CodecError("the server sent tokens without their text")

    def flush(self) -> str:
        return ""
