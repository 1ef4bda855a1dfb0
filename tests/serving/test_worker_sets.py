"""What announced cards make together: sets, roles, adapters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from pipeline.network import EndpointId, Model
from pipeline.protocols.card import (
    ByteLevel,
    CheckedFile,
    LoraInfo,
    ModelDeploymentCard,
    ModelInfoFile,
    ModelRuntimeConfig,
    ModelType,
    PromptFormatterFile,
    TokenizerFile,
    WorkerType,
)
from serving.deployment.worker_sets import Announced, Deployment, deployment_of

BACKEND = EndpointId("ns", "backend", "generate")
PREFILL = EndpointId("ns", "prefill", "generate")
BYTES = ByteLevel("x")


def file(digit: str) -> CheckedFile:
    return CheckedFile(f"/a/{digit}", "blake3:" + digit * 64, 5, digit * 64)


TOKENIZER = TokenizerFile("hf_tokenizer_json", file("a"))
TEMPLATE = PromptFormatterFile("hf_chat_template", file("a"))


def announced(
    instance_id: int, endpoint: EndpointId = BACKEND, *, suffix: str | None = None, **fields: Any
) -> Announced:
    card = ModelDeploymentCard.named("m", kv_cache_block_size=16, model_input="Tokens")
    return Announced.of(Model(endpoint, instance_id, evolve(card, **{"byte_level": BYTES, **fields}), suffix))


def prefill(instance_id: int, endpoint: EndpointId = PREFILL, **fields: Any) -> Announced:
    fields = {"model_type": ModelType.Prefill, "worker_type": WorkerType.PREFILL, **fields}
    return announced(instance_id, endpoint, needs=[[WorkerType.DECODE]], **fields)


def decode(instance_id: int, endpoint: EndpointId = BACKEND, **fields: Any) -> Announced:
    return announced(instance_id, endpoint, worker_type=WorkerType.DECODE, **fields)


def ids(found: Deployment, endpoint: EndpointId = BACKEND) -> list[int]:
    return [one.instance_id for one in found.answering[endpoint].workers.members]


def test_cards_of_one_endpoint_that_agree_are_a_set() -> None:
    found = deployment_of([announced(3), announced(1)])
    assert ids(found) == [1, 3]
    assert (found.answering[BACKEND].prefill, found.answering[BACKEND].missing, found.refused) == (None, "", {})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"kv_cache_block_size": 32}, "kv_cache_block_size (32, not 16)"),
        ({"display_name": "other"}, "name (other, not m)"),
        ({"byte_level": ByteLevel("y")}, "byte_level"),
        ({"tokenizer": TokenizerFile("hf_tokenizer_json", file("a"))}, "tokenizer (blake3:aaa"),
        ({"model_info": ModelInfoFile("hf_config_json", file("b"))}, "config (blake3:bbb"),
        ({"runtime_config": ModelRuntimeConfig(context_length=9)}, "context_length (9, not 0)"),
        ({"worker_type": WorkerType.DECODE}, "worker_type (decode, not none)"),
        ({"model_type": ModelType.Chat}, "model_type (Chat, not Chat|Completions)"),
        ({"model_input": "Text"}, "model_input (Text, not Tokens)"),
        ({"aliases": ["n"]}, "aliases"),
        ({"byte_level": None, "tokenizes": True}, "tokenizes (True, not none)"),
    ],
)
def test_cards_that_disagree_are_refused_as_a_whole_with_what_differs(fields: dict[str, Any], told: str) -> None:
    found = deployment_of([announced(1), announced(2), announced(0xABC, **fields)])
    assert found.answering == {}
    problem = found.refused[BACKEND]
    assert told in problem
    assert "abc differ from 1, 2 in" in problem
    assert str(BACKEND) in problem


@pytest.mark.parametrize(
    "fields",
    [
        {"source_path": "/elsewhere"},
        {"user_data": {"x": 1}},
        {"runtime_config": ModelRuntimeConfig(total_kv_blocks=9, max_num_seqs=3, taints={"a"})},
    ],
)
def test_where_a_folder_lies_and_how_large_a_worker_is_does_not_count(fields: dict[str, Any]) -> None:
    one = deployment_of([announced(1)])
    both = deployment_of([announced(1), announced(2, **fields)])
    assert ids(both) == [1, 2]
    assert both.answering[BACKEND].workers.identity == one.answering[BACKEND].workers.identity


def test_a_conflict_clears_when_those_that_differ_are_gone() -> None:
    assert deployment_of([announced(1), announced(2, kv_cache_block_size=8)]).refused
    assert ids(deployment_of([announced(1)])) == [1]


def test_a_message_stays_short_whatever_the_cards_hold() -> None:
    many = [announced(number, kv_cache_block_size=8) for number in range(100, 300)]
    problem = deployment_of([*many, announced(1, aliases=["x" * 10_000])]).refused[BACKEND]
    assert len(problem) < 500
    assert "and 196 more" in problem


def test_prefill_workers_belong_to_the_decode_workers_of_their_namespace() -> None:
    others = [EndpointId("another", "prefill", "generate"), EndpointId("other", "prefill", "generate")]
    found = deployment_of([decode(1), prefill(2), *(prefill(3, each) for each in others)])
    answering = found.answering[BACKEND]
    assert answering.prefill is not None
    assert [one.instance_id for one in answering.prefill.members] == [2]
    assert list(found.answering) == [BACKEND], "prefill workers answer nothing"


def test_prefill_workers_may_be_at_any_component() -> None:
    elsewhere = EndpointId("ns", "fast", "generate")
    answering = deployment_of([decode(1), prefill(2, elsewhere)]).answering[BACKEND]
    assert answering.prefill is not None
    assert answering.prefill.endpoint == elsewhere


def test_of_two_sets_that_prefill_the_first_is_used_whichever_was_announced_first() -> None:
    fast, slow = prefill(2, EndpointId("ns", "fast", "generate")), prefill(3, EndpointId("ns", "slow", "generate"))
    for cards in ([decode(1), fast, slow], [slow, fast, decode(1)]):
        used = deployment_of(cards).answering[BACKEND].prefill
        assert used is not None
        assert used.endpoint.component == "fast"


def test_aggregated_workers_use_no_prefill_workers() -> None:
    assert deployment_of([announced(1), prefill(2)]).answering[BACKEND].prefill is None


@pytest.mark.parametrize(
    ("needs", "others", "missing"),
    [
        ([[WorkerType.PREFILL]], [], True),
        ([[WorkerType.PREFILL]], [prefill(2)], False),
        ([[WorkerType.PREFILL, WorkerType.ENCODE]], [prefill(2)], True),
        ([[WorkerType.ENCODE], [WorkerType.PREFILL]], [prefill(2)], False),
        ([], [], False),
    ],
)
def test_a_set_is_ready_once_one_alternative_of_its_needs_is_there(
    needs: list[Any], others: list[Announced], missing: bool
) -> None:
    answering = deployment_of([decode(1, needs=needs), *others]).answering[BACKEND]
    assert bool(answering.missing) is missing


def test_prefill_workers_with_another_tokenizer_are_refused_and_the_others_serve_alone() -> None:
    other: dict[str, Any] = {"byte_level": None, "tokenizer": TokenizerFile("hf_tokenizer_json", file("a"))}
    found = deployment_of([decode(1), prefill(2, **other)])
    assert (found.answering[BACKEND].prefill, found.answering[BACKEND].missing) == (None, "")
    assert "another tokenizer" in found.refused[PREFILL]


def test_adapters_are_names_of_the_workers_that_have_them() -> None:
    lora: dict[str, Any] = {"lora": LoraInfo("sql")}
    cards = [decode(1), decode(2), decode(1, suffix="sql", **lora), prefill(3), prefill(3, suffix="sql", **lora)]
    answering = deployment_of(cards).answering[BACKEND]
    assert list(answering.workers.adapters) == ["sql"]
    assert answering.adapter_workers("sql") == {1, 3}
    assert answering.adapter_workers("none") == set()


def test_adapters_alone_are_no_set() -> None:
    found = deployment_of([announced(1, suffix="sql")])
    assert (found.answering, found.refused) == ({}, {})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"display_name": " "}, "without a name"),
        ({"model_input": "Text"}, "takes Text"),
        ({"kv_cache_block_size": 0}, "KV blocks of no tokens"),
        ({"tokenizes": True}, "both at its workers and in its card"),
        ({"tokenizes": True, "byte_level": None, "tokenizer": TOKENIZER}, "both at its workers and in its card"),
        (
            {"tokenizes": True, "byte_level": None, "chat_template_file": TEMPLATE},
            "both at its workers and in its card",
        ),
        ({"tokenizes": True, "byte_level": None, "worker_type": WorkerType.DECODE}, "is to tokenize as decode"),
    ],
)
def test_what_no_front_end_can_serve_is_refused(fields: dict[str, Any], told: str) -> None:
    found = deployment_of([announced(1, **fields)])
    assert found.answering == {}
    assert told in found.refused[BACKEND]


def test_workers_that_tokenize_are_a_set() -> None:
    found = deployment_of([announced(each, byte_level=None, tokenizes=True) for each in (1, 2)])
    assert (ids(found), found.refused) == ([1, 2], {})


@pytest.mark.parametrize(
    "fields", [{"model_type": ModelType.Embedding}, {"worker_type": WorkerType.ENCODE, "model_type": ModelType(0)}]
)
def test_workers_that_take_no_text_are_left_out_in_silence(fields: dict[str, Any]) -> None:
    one = announced(1, **fields)
    found = deployment_of([one])
    assert (found.answering, found.refused, one.names) == ({}, {}, ())


def test_the_names_of_a_card_are_those_that_clients_use() -> None:
    assert announced(1, aliases=["n", " "]).names == ("m", "n")
    assert announced(1, suffix="sql", lora=LoraInfo("SQL")).names == ("SQL",)
    assert announced(1, suffix="sql").names == ("sql",)
