"""Every field of a request: it changes what is done, is refused, or is known to change nothing."""

from __future__ import annotations

import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from attrs import fields

from operators import Model
from operators.text import validate
from operators.text.preprocess import preprocess
from pipeline import InvalidArgument
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.wire import from_plain, to_plain
from serving.openai import AnswerForm

NO_EFFECT = {"user", "metadata", "parallel_tool_calls", "service_tier"}
"""Fields that change nothing; the table of the docs has the reason of each."""
AT_THE_DOOR = {"stream"}
"""Fields that only the HTTP side reads."""

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ tools }}{{ reasoning_effort }}{{ thinking }}"
    "{{ extra }}{% if add_generation_prompt %}>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f"}}
SAMPLES: dict[str, Any] = {
    "model": "other",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "bye"}],
    "prompt": "bye",
    "prompt_embeds": b64encode(bytes(100)).decode(),
    "stop": "x",
    "stop_token_ids": [1],
    "logit_bias": {"1": 1.0},
    "user": "u",
    "metadata": {"a": "b"},
    "response_format": {"type": "json_object"},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "allowed_token_ids": [1],
    "bad_words_token_ids": [[1]],
    "logprob_token_ids": [1],
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"a": 1},
    "cache_salt": "s",
    "nvext": {"use_raw_prompt": True, "annotations": ["x"]},
    "tools": [TOOL],
    "tool_choice": "required",
    "functions": [],
    "function_call": "auto",
    "reasoning_effort": "low",
    "thinking": True,
    "chat_template_args": {"extra": "x"},
    "modalities": ["audio"],
    "prediction": {"type": "content", "content": "x"},
    "audio": {"voice": "alloy"},
    "service_tier": "default",
    "web_search_options": {},
    "suffix": "s",
    "unsupported": {},
    "skip_special_tokens": False,
    "add_generation_prompt": False,
    "guided_decoding_backend": "b",
    "guided_whitespace_pattern": "b",
    "logprobs": 2,
}
"""A value of each field that differs from leaving it out; of those not here True, or 2, can be read."""
OTHERS: dict[str, dict[str, Any]] = {
    "guided_decoding_backend": {"guided_regex": "a"},
    "tool_choice": {"tools": [TOOL]},
    "stream_options": {"stream": True},
}
"""What else a field needs in its request."""
KINDS = [
    (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
    (CompletionRequest, {"model": "m", "prompt": "hi"}),
]
CASES = [(kind, plain, field.name) for kind, plain in KINDS for field in fields(kind)]


def sample(kind: Any, plain: dict[str, Any], name: str) -> Any:
    """The request with this field. A switch is true, a number is 2."""
    given = plain | OTHERS.get(name, {})
    if name in SAMPLES and not (kind is ChatCompletionRequest and name == "logprobs"):
        return from_plain(given | {name: SAMPLES[name]}, kind)
    try:
        return from_plain(given | {name: True}, kind)
    except InvalidArgument:
        return from_plain(given | {name: 2}, kind)


def outcome(request: Any) -> Any:
    """All that depends on the request: what the engine gets, and the form of the answer."""
    model = Model.byte_level("m", chat_template=TEMPLATE)
    try:
        validate(request)
        payload, annotations = preprocess(request, model, "id", model.tokenizer.encode)
    except InvalidArgument as refused:
        return refused.field
    return to_plain(payload), annotations, AnswerForm.of(request, id="i", created=1)


@pytest.mark.parametrize(("kind", "plain", "name"), CASES, ids=[f"{kind.__name__}-{name}" for kind, _, name in CASES])
def test_no_field_is_accepted_and_ignored(kind: Any, plain: dict[str, Any], name: str) -> None:
    base = from_plain(plain | OTHERS.get(name, {}), kind)
    changes = outcome(sample(kind, plain, name)) != outcome(base)
    assert changes == (name not in NO_EFFECT | AT_THE_DOOR)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, _, name in CASES])
def test_the_docs_have_every_field(kind: Any, name: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    table = text.partition("## What is done with each field of a request")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert name == "unsupported" or name in re.findall(r"`(\w+)`", " ".join(rows))
