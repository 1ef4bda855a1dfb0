"""Models from folders and from nothing, and the errors for a folder that is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from operators import ByteTokenizer, Model
from pipeline import InvalidArgument

ROOT = Path(__file__).parents[3]
Folder = Callable[..., Path]
USER = [{"role": "user", "content": "hi"}]


def test_a_folder_is_read_whole(folder: Folder) -> None:
    path = folder(
        tokenizer_config__json={"eos_token": {"content": "<|end|>"}, "bos_token": "<|begin|>", "model_max_length": 5},
        chat_template__jinja="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        config__json={"eos_token_id": 9, "max_position_embeddings": 4096},
        generation_config__json={"eos_token_id": [7, 8]},
    )
    model = Model.from_folder(path)
    assert model.name == "tiny-model"
    assert model.chat_template is not None
    assert model.chat_template.render(USER) == "<|begin|>hi<|end|>"
    assert model.eos_token_ids == (7, 8, model.tokenizer.token_id("<|end|>"))
    assert model.context_length == 4096
    assert Model.from_folder(str(path), "other").name == "other"


def test_a_tokenizer_alone_is_a_model(folder: Folder) -> None:
    model = Model.from_folder(folder())
    assert (model.chat_template, model.eos_token_ids, model.context_length) == (None, (), None)


@pytest.mark.parametrize(
    ("files", "prompt"),
    [
        ({"chat_template__jinja": "J", "chat_template__json": {"chat_template": "S"}}, "J"),
        ({"chat_template__json": {"chat_template": "S"}, "tokenizer_config__json": {"chat_template": "C"}}, "S"),
        ({"tokenizer_config__json": {"chat_template": "C"}}, "C"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default", "template": "D"}]}}, "D"),
        ({"tokenizer_config__json": {"chat_template": {"default": "D", "tool_use": "T"}}}, "D"),
    ],
)
def test_the_most_particular_template_counts(folder: Folder, files: dict[str, Any], prompt: str) -> None:
    template = Model.from_folder(folder(**files)).chat_template
    assert template is not None
    assert template.render(USER) == prompt


def test_a_template_for_tools_is_found_by_its_name(folder: Folder) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    template = Model.from_folder(folder(tokenizer_config__json={"chat_template": named})).chat_template
    assert template is not None
    assert template.render(USER, tools=[{"name": "f"}]) == "T"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {
            "tokenizer_config__json": {
                "chat_template": {"default": "D{{ bos_token }}", "tool_use": "T"},
                "bos_token": "<|x|>",
            }
        },
        {"chat_template__jinja": "J{{ eos_token }}", "tokenizer_config__json": {"eos_token": "<|end|>"}},
        {"config__json": {"eos_token_id": 9, "max_position_embeddings": 4096}},
    ],
)
def test_a_model_that_is_written_is_read_as_the_same(folder: Folder, tmp_path: Path, files: dict[str, Any]) -> None:
    model = Model.from_folder(folder(**files))
    (written := tmp_path / "written").mkdir()
    model.write_folder(written)
    again = Model.from_folder(written, model.name)
    assert (again.eos_token_ids, again.context_length) == (model.eos_token_ids, model.context_length)
    assert again.tokenizer.encode("hello world") == model.tokenizer.encode("hello world")
    assert (again.chat_template is None) == (model.chat_template is None)
    if model.chat_template is not None and again.chat_template is not None:
        for tools in (None, [{"x": 1}]):
            assert again.chat_template.render(USER, tools=tools) == model.chat_template.render(USER, tools=tools)


def test_the_built_in_model_has_no_files_to_write(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="has no file"):
        Model.byte_level().write_folder(tmp_path)


def test_templates_are_given_the_time_of_day(folder: Folder) -> None:
    path = folder(chat_template__jinja="{{ strftime_now('%Y') }}")
    template = Model.from_folder(path, now=lambda: datetime(2031, 1, 1, tzinfo=UTC)).chat_template
    assert template is not None
    assert template.render(USER) == "2031"


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({"config__json": {"max_position_embeddings": 0}, "tokenizer_config__json": {"model_max_length": 5}}, 5),
        ({"config__json": {"text_config": {"max_position_embeddings": 7}}}, 7),
        ({"config__json": {}, "tokenizer_config__json": {"model_max_length": 5}}, 5),
        ({"tokenizer_config__json": {"model_max_length": 10**30}}, None),
        ({"config__json": '{"rope": NaN, "max_position_embeddings": 3}'}, 3),
    ],
)
def test_the_context_length_is_the_first_that_is_given(
    folder: Folder, files: dict[str, Any], length: int | None
) -> None:
    assert Model.from_folder(folder(**files)).context_length == length


@pytest.mark.parametrize(
    ("files", "file", "problem"),
    [
        ({"tokenizer__json": None}, "tokenizer.json", "is missing"),
        ({"tokenizer__json": "{}"}, "tokenizer.json", "not a tokenizer"),
        ({"tokenizer_config__json": "{"}, "tokenizer_config.json", "is not JSON"),
        ({"config__json": "[]"}, "config.json", "must hold a JSON object"),
        ({"config__json": {"max_position_embeddings": None}}, "config.json", "max_position_embeddings"),
        ({"config__json": {"max_position_embeddings": "8"}}, "config.json", "max_position_embeddings"),
        ({"config__json": {"eos_token_id": "x"}}, "config.json", "eos_token_id"),
        ({"generation_config__json": {"eos_token_id": [1, True]}}, "generation_config.json", "eos_token_id"),
        ({"chat_template__jinja": "{% for %}"}, "chat_template.jinja", "line 1"),
        ({"tokenizer_config__json": {"chat_template": 5}}, "tokenizer_config.json", "chat_template"),
        ({"chat_template__json": {"chat_template": {"other": "x"}}}, "chat_template.json", "default"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    folder: Folder, files: dict[str, Any], file: str, problem: str
) -> None:
    path = folder(**files)
    with pytest.raises(InvalidArgument, match=problem) as caught:
        Model.from_folder(path)
    assert caught.value.field == file
    assert str(path / file) in str(caught.value)


def test_a_file_that_is_no_text_is_named(folder: Folder) -> None:
    path = folder()
    (path / "config.json").write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match=r"config\.json: is not JSON"):
        Model.from_folder(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nowhere is not a model folder"):
        Model.from_folder(tmp_path / "nowhere")


def test_importing_operators_loads_no_optional_library() -> None:
    code = "import operators, sys; print(*sys.modules.keys() & {'tokenizers', 'jinja2'})"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two")], "two"),
        ([("user", "one"), ("assistant", "1")], "one"),
        ([("system", "alone")], "alone"),
    ],
)
def test_a_byte_level_model_gets_the_last_user_message_only(messages: list[tuple[str, str]], prompt: str) -> None:
    model = Model.byte_level()
    assert model.chat_template is not None
    assert model.chat_template.render([{"role": role, "content": text} for role, text in messages]) == prompt
    assert (model.name, model.eos_token_ids) == ("echo", (ByteTokenizer.eos_token_id,))
    assert Model.byte_level("other", context_length=9).context_length == 9
