"""VllmText: a vLLM server as an engine that gives texts beside the ids of tokens, and tokenizes prompts.

For models whose tokenizer is at the server only. Stop strings are found there; text is in the chunk in which the
server sends it, which may be a later one than its tokens.

Source: vllm/entrypoints/openai/completion/protocol.py and vllm/entrypoints/serve/tokenize/protocol.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.wire import from_json, to_json

from ..llm import GenerateContext
from .errors import of_status
from .facts import ServerFacts
from .streamed_answer import U32_MAX
from .token_answer import TokenAnswer
from .upstream import Call
from .vllm import Routes, VllmUpstream
from .vllm_logprobs import of_completion

TOKENIZE = "/tokenize"


class VllmText(VllmUpstream):
    """One vLLM server with its tokenizer. See `VllmUpstream`; requests go to `/v1/completions`.

    Its discovery raises InvalidArgument for a server that was started without a tokenizer.
    """

    async def discover(self) -> ServerFacts:
        facts = await super().discover()
        # Texts come by this route only.
        self.routes = Routes(prioritizes=self.routes.prioritizes)
        await self.tokenized({"model": facts.model, "prompt": ""})
        return facts

    def call(self, request: PreprocessedRequest, context: GenerateContext) -> Call:
        call = super().call(request, context)
        answer = TextTokenAnswer(request.sampling_options.n or 1, len(request.token_ids), of_completion)
        return evolve(call, answer=answer)

    async def prompt_tokens(self, body: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a prompt for the engine's model. See `tokenized`."""
        return await self.tokenized({**body, "model": self.known.model})

    async def tokenized(self, body: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a prompt: `prompt`, or `messages` with what belongs to the chat template.

        Raise the error of a server that refuses it, InvalidArgument for one without a tokenizer, and as `post`.
        """
        status, answer = await self.post(TOKENIZE, to_json(body))
        if status in (404, 405, 501):
            text = f"{self.address} has no tokenizer: start it with one, or give the folder of its model"
            raise InvalidArgument(text, field="model_path")
        if status != 200:
            raise of_status(status, answer)
        try:
            tokens = from_json(answer, dict[str, Any])["tokens"]
        except (InvalidArgument, KeyError) as error:
            raise InvalidMessage(f"{TOKENIZE} gave no tokens", cause=error) from error
        if type(tokens) is not list or not all(type(one) is int and 0 <= one <= U32_MAX for one in tokens):
            raise InvalidMessage(f"{TOKENIZE} gave tokens that are no ids")
        return tokens


class TextTokenAnswer(TokenAnswer):
    """A streamed answer with token ids and their texts."""

    def _chunk(self, choice: Mapping[str, Any]) -> LLMEngineOutput:
        output = super()._chunk(choice)
        text = choice.get("text") or ""
        if type(text) is not str:
            raise InvalidMessage("the text of a chunk is no text")
        output.text = text
        return output
