"""Chat templates behave as they do in the models' own repositories, and cannot be turned against the server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from operators import ChatTemplate
from pipeline import InvalidArgument
from pipeline.errors import CodecError

USER = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{% for m in messages %}\n  {{ m.role }}\n{% endfor %}x", "  user\nx"),
        ("  {% if true %}x{% endif %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{{ add_generation_prompt }} {{ tools is none }} {{ documents is none }}", "True True True"),
        ("{{ bos_token }}|", "|"),
    ],
)
def test_templates_run_as_hugging_face_runs_them(source: str, prompt: str) -> None:
    assert render(source) == prompt


def test_tokens_tools_and_arguments_reach_the_template() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ tools[0].name }}{{ mood }}{{ add_generation_prompt }}", tokens={"bos_token": "<s>"}
    )
    assert template.render(USER, tools=[{"name": "f"}], add_generation_prompt=False, args={"mood": "!"}) == "<s>f!False"


GIVEN = ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"]
GLOBALS = ["strftime_now", "range", "dict", "namespace", "cycler", "joiner", "lipsum"]


@pytest.mark.parametrize("name", [*GIVEN, *GLOBALS])
@pytest.mark.parametrize("now", [None, lambda: datetime(2031, 2, 3, tzinfo=UTC)])
def test_arguments_that_would_replace_a_name_of_the_template_are_refused(name: str, now: Any) -> None:
    """A template that calls a global which is a text now fails."""
    template = ChatTemplate("{% for i in range(1) %}{{ messages[0].content }}{% endfor %}", now=now)
    with pytest.raises(InvalidArgument, match=name) as caught:
        template.render(USER, args={"mood": "!", name: "x"})
    assert caught.value.field == f"chat_template_args.{name}"


def test_a_chat_with_tools_takes_the_template_for_tools() -> None:
    template = ChatTemplate("plain", tool_source="with tools")
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=[{"name": "f"}]) == "with tools"


def test_the_time_of_day_comes_from_outside() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d') }}{% else %}unknown{% endif %}"
    assert ChatTemplate(source).render(USER) == "unknown"
    assert ChatTemplate(source, now=lambda: datetime(2031, 2, 3, tzinfo=UTC)).render(USER) == "2031-02-03"


def test_text_parts_are_joined_for_a_template_that_reads_texts() -> None:
    assert render("{{ messages[0]['content'] }}", PARTS) == "a\nb"


def test_a_text_becomes_a_part_for_a_template_that_reads_parts() -> None:
    source = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}"
    assert render(source, PARTS) == "[a][b]"
    assert render(source, USER) == "[hi]"


def test_a_template_that_refuses_the_messages_blames_the_caller() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 + none }}",
        "{{ messages[7].content.x.y }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'secret'.nothing() }}",
    ],
)
def test_the_error_of_a_template_shows_nothing_of_its_inside(source: str) -> None:
    with pytest.raises(CodecError) as caught:
        render(source)
    assert str(caught.value) == "the chat template failed on these messages"
    assert caught.value.__cause__ is not None


def test_a_template_that_does_not_parse_names_the_line() -> None:
    with pytest.raises(CodecError, match="line 2"):
        ChatTemplate("fine\n{% for %}")
