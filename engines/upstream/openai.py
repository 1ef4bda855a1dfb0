"""OpenAIUpstream: any other OpenAI-compatible server as an engine, as far as its interface goes.

| server                            | tokens in                    | tokens out                            |
|-----------------------------------|------------------------------|---------------------------------------|
| Penstock, NVIDIA Dynamo (`nvext`) | `/v1/completions`, ids       | `completion_token_ids`                |
| with `return_token_ids`           | `/v1/completions`, ids       | `token_ids`                           |
| llama.cpp                         | `/completion`, ids           | `tokens`                              |
| text only, which takes ids        | `/v1/completions`, ids       | text: each token is `UNKNOWN_TOKEN`   |
| text only                         | refused at the start         |                                       |

None of them publishes KV events: a router predicts their caches. A server that was started again is known by
`process_start_time_seconds` of its `/metrics`; one without it by a refused connection, or a 503 of `/health` while it
loads its model. A restart that no look and no request meets is not seen: what was predicted then ends by itself.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from attrs import evolve

from pipeline import InvalidArgument, PenstockError
from pipeline.errors import BackendUnknown, InvalidMessage, ResponseTimeout, Unavailable, may_migrate
from pipeline.protocols import PreprocessedRequest
from pipeline.wire import plain_from_json, plain_to_json

from ..llm import GenerateContext
from . import llama_cpp
from .client import Transport
from .errors import of_status
from .facts import ServerFacts
from .openai_request import completion, headers_of
from .prometheus_text import samples
from .text_answer import TextAnswer
from .token_answer import TokenAnswer
from .upstream import SILENCE_S, Call, Upstream
from .vllm_logprobs import of_completion
from .vllm_request import completion_body

COMPLETIONS = "/v1/completions"

_NVEXT_OWNERS = ("penstock", "nvidia")
"""`owned_by` of the models of a server that understands `nvext`: ours, and NVIDIA Dynamo's front end."""
_NO_SUCH_PAGE = (404, 405, 501)
_SHOWN = 8


class IdForm(StrEnum):
    """How a server sends the ids of its tokens."""

    NVEXT = "nvext"
    TOKEN_IDS = "token_ids"
    LLAMA_CPP = "llama.cpp"
    NONE = "none"


class OpenAIUpstream(Upstream):
    """One OpenAI-compatible server. See `Upstream` for the errors, and for what a stop does.

    What a server in text cannot give is refused by name: several choices, log probabilities, guided decoding, and
    unless it knows `nvext` a tenant's own cache and a limit of reasoning. A LoRA name is the model of its request.
    Its answers have no ids, so none goes on at another worker: a break behind the first token is a BackendUnknown. A
    request with a stop id or a limit of the fewest tokens needs a server that knows these fields beyond the OpenAI API.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        silence_s: float = SILENCE_S,
        health_every_s: float = 1.0,
        load_every_s: float = 1.0,
        transport: Transport | None = None,
        ids: IdForm | None = None,
        is_continued: bool = True,
    ) -> None:
        """As `Upstream`; `ids` is how the server sends ids, by default found out by a request for one token.

        Without `is_continued` the caller continues no broken answer, and gets the error of each break as it is.
        """
        super().__init__(
            url,
            model=model,
            api_key=api_key,
            silence_s=silence_s,
            health_every_s=health_every_s,
            load_every_s=load_every_s,
            transport=transport,
        )
        self.ids, self._is_continued = ids, is_continued

    async def discover(self) -> ServerFacts:
        model, knows_nvext = await self.found_model()
        facts = ServerFacts(model=model, incarnation=await self.incarnation())
        props = await self._props()
        if props is not None:
            self.ids = IdForm.LLAMA_CPP
            return _with_props(facts, props)
        if self.ids is None:
            self.ids = IdForm.NVEXT if knows_nvext else await self._found_ids(model)
        return facts

    async def found_model(self) -> tuple[str, bool]:
        """Return the name of the model to use, and whether the server knows `nvext`.

        Raise InvalidArgument for a model that it does not have, or is not named where it has no list; Unavailable if
        it has none now; and as `get`.
        """
        models = await self._models()
        model = self._chosen(models)
        return model, models is not None and models[model] in _NVEXT_OWNERS

    async def incarnation(self) -> str | None:
        """Return when the server was started, if its metrics have that. Raise what breaks the connection."""
        try:
            status, body = await self.get("/metrics")
        except (InvalidMessage, ResponseTimeout):
            return None
        started = next(samples(body.decode("utf-8", "replace"), "process_start_time_seconds"), None)
        return None if status != 200 or started is None else str(started.value)

    async def _models(self) -> dict[str, Any] | None:
        """Return the owners of the server's models by name; None if it has no such page."""
        status, body = await self.get("/v1/models")
        if status in _NO_SUCH_PAGE:
            return None
        if status != 200:
            raise of_status(status, body)
        try:
            return {str(one["id"]): one.get("owned_by") for one in plain_from_json(body)["data"]}
        except (InvalidArgument, KeyError, TypeError, AttributeError) as error:
            raise InvalidMessage("/v1/models is no list of models", cause=error) from error

    def call(self, request: PreprocessedRequest, context: GenerateContext) -> Call:
        headers, prompt_tokens = headers_of(context), len(request.token_ids)
        model = (request.model or self.model or "") if self.facts is None else self.facts.model
        match self.ids:
            case IdForm.LLAMA_CPP:
                body = llama_cpp.completion_body(request)
                answer = llama_cpp.LlamaAnswer(prompt_tokens, wants_logprobs="n_probs" in body)
                return Call(llama_cpp.COMPLETION, plain_to_json(body), headers, answer)
            case IdForm.TOKEN_IDS:
                body = completion_body(request, self.known, context.id, prioritizes=False)
                del body["request_id"]
                choices = request.sampling_options.n or 1
                return Call(
                    COMPLETIONS, plain_to_json(body), headers, TokenAnswer(choices, prompt_tokens, of_completion)
                )
        body = completion(request, model, nvext=self.ids is IdForm.NVEXT)
        return Call(COMPLETIONS, plain_to_json(body), headers, TextAnswer())

    def failure(self, error: PenstockError, call: Call) -> PenstockError:
        error = super().failure(error, call)
        answer = call.answer
        has_no_ids = isinstance(answer, TextAnswer) and answer.tokens > 0 and not answer.has_ids
        if self._is_continued and has_no_ids and may_migrate(error):
            return BackendUnknown(f"{error.type_name}: {error.message}; no other worker can go on without ids")
        return error

    def _chosen(self, models: dict[str, Any] | None) -> str:
        """Return the name of the model to use. Raise InvalidArgument or Unavailable if there is none."""
        if models is None:
            if self.model is None:
                raise InvalidArgument(f"{self.address} does not list its models; name one", field="model")
            return self.model
        if not models:
            raise Unavailable(f"{self.address} has no model now")
        name = next(iter(models)) if self.model is None else self.model
        if name not in models:
            others = [*list(models)[:_SHOWN], *(["..."] if len(models) > _SHOWN else [])]
            raise InvalidArgument(f"{self.address} has no {name!r}; it has {', '.join(others)}", field="model")
        return name

    async def _props(self) -> dict[str, Any] | None:
        """Return the properties of a llama.cpp server; None for any other."""
        if self.ids not in (None, IdForm.LLAMA_CPP):
            return None
        status, body = await self.get("/props")
        try:
            props = plain_from_json(body) if status == 200 else None
        except InvalidArgument:
            return None
        return props if isinstance(props, dict) and "default_generation_settings" in props else None

    async def _found_ids(self, model: str) -> IdForm:
        """Return the form of ids, by one token after a prompt of one id. Raise InvalidArgument if it takes no ids."""
        probe = {"model": model, "prompt": [1], "max_tokens": 1, "stream": False}
        status, body = await self.post(COMPLETIONS, plain_to_json(probe | {"return_token_ids": True}))
        if status in (400, 422):  # a strict server refuses fields that it does not know
            status, body = await self.post(COMPLETIONS, plain_to_json(probe))
        if status in (400, 422, *_NO_SUCH_PAGE):
            text = f"{self.address} takes no prompts as token ids at {COMPLETIONS}, so it cannot be an engine here"
            raise InvalidArgument(text, field="upstream") from of_status(status, body)
        if status != 200:
            raise of_status(status, body)
        try:
            choice = plain_from_json(body)["choices"][0]
            return IdForm.TOKEN_IDS if choice.get("token_ids") else IdForm.NONE
        except (InvalidArgument, KeyError, IndexError, TypeError, AttributeError) as error:
            raise InvalidMessage(f"{COMPLETIONS} gives no completion", cause=error) from error


def _with_props(facts: ServerFacts, props: dict[str, Any]) -> ServerFacts:
    """Return the facts with those of llama.cpp's `/props`."""
    settings = props["default_generation_settings"]
    length = settings.get("n_ctx") if isinstance(settings, dict) else None
    slots = props.get("total_slots")
    root = props.get("model_path")
    return evolve(
        facts,
        context_length=length if type(length) is int and length > 0 else None,
        max_num_seqs=slots if type(slots) is int and slots > 0 else None,
        root=root if isinstance(root, str) else None,
    )
