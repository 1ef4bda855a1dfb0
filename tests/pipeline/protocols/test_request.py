"""The request in tokens, its options and its routing records."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidArgument
from pipeline.protocols import (
    BlockExtraInfo,
    GuidedDecodingOptions,
    MigrationState,
    PreprocessedRequest,
    RequestTracker,
    RouterConfigOverride,
    RoutingConstraints,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from pipeline.protocols.field_rules import InvalidRecord
from pipeline.protocols.request import MmRoutingInfo, MultimodalData, PreprocessedEmbeddingRequest
from pipeline.wire import from_json, from_plain, to_json, to_plain


def test_the_minimal_canary_payload_is_read() -> None:
    request = from_json(b'{"token_ids":[1],"_HEALTH_CHECK":true}', PreprocessedRequest)
    assert request == PreprocessedRequest([1], is_probe=True)
    assert request.model == ""


@pytest.mark.parametrize(("is_probe", "written"), [(False, None), (True, True)])
def test_is_probe_is_written_only_if_true_and_under_its_own_key(is_probe: bool, written: bool | None) -> None:
    plain = to_plain(PreprocessedRequest([1], is_probe=is_probe))
    assert plain.get("_HEALTH_CHECK") is written
    assert "is_probe" not in plain


def test_which_fields_are_written_when_nothing_is_set() -> None:
    plain = to_plain(PreprocessedRequest([1]))
    assert {key: value for key, value in plain.items() if not isinstance(value, dict)} == {
        "token_ids": [1],
        "model": "",
        "eos_token_ids": [],
        "mdc_sum": None,
        "annotations": [],
        "router_config_override": None,
    }
    assert plain["stop_conditions"] == dict.fromkeys(to_plain(StopConditions()))
    assert len(plain["stop_conditions"]) == 8
    assert len(plain["sampling_options"]) == 14
    assert len(plain["output_options"]) == 5
    assert to_plain(RoutingHints()) == {}


def test_what_belongs_to_this_process_stays_here() -> None:
    tracker = RequestTracker(lambda: 0.0, lambda: 0, lambda: pytest.fail("no phase is set"))
    request = PreprocessedRequest([1], tracker=tracker, migration_state=MigrationState())
    assert not {"tracker", "migration_state"} & to_plain(request).keys()
    again = from_json(b'{"token_ids":[1],"tracker":5,"migration_state":6}', PreprocessedRequest)
    assert again.tracker is None
    assert again.migration_state is None


def test_the_cache_namespace_travels_as_cache_salt() -> None:
    plain = to_plain(PreprocessedRequest([1], routing=RoutingHints(cache_namespace="tenant")))
    assert plain["routing"] == {"cache_salt": "tenant"}
    routing = from_plain(plain, PreprocessedRequest).routing
    assert routing is not None
    assert routing.cache_namespace == "tenant"


def test_an_encoder_result_is_absent_or_the_same_bytes() -> None:
    assert "encoder_result" not in to_plain(PreprocessedRequest([1]))
    request = PreprocessedRequest([1], encoder_result={"z": [1.5, None], "a": {"b": "\u00e9"}})
    assert to_json(from_json(to_json(request), PreprocessedRequest)) == to_json(request)


@given(st.text(max_size=5), st.text(max_size=5))
def test_an_annotation_value_is_the_text_after_the_first_colon_of_its_key(key: str, value: str) -> None:
    request = PreprocessedRequest([1], annotations=["other", f"{key}:{value}", f"{key}:later"])
    if not "other".startswith(f"{key}:"):
        assert request.get_annotation_value(key) == value


def test_an_annotation_is_matched_as_a_whole() -> None:
    for request in (
        PreprocessedRequest([1], annotations=["plain", "key:a:b"]),
        PreprocessedEmbeddingRequest([[1]], "m", annotations=["plain", "key:a:b"]),
    ):
        assert request.has_annotation("plain")
        assert not request.has_annotation("key")
        assert request.get_annotation_value("plain") is None
        assert request.get_annotation_value("key") == "a:b"
        assert request.get_annotation_value("ke") is None


def test_ensure_routing_makes_hints_once() -> None:
    request = PreprocessedRequest([1])
    hints = request.ensure_routing()
    hints.dp_rank = 3
    assert request.ensure_routing() is hints is request.routing


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (MmRoutingInfo([9, 9], [None, BlockExtraInfo([])]), ([9, 9], [None, BlockExtraInfo([])])),
        (MmRoutingInfo([], [None]), ([1, 2], None)),
        (None, ([1, 2], None)),
    ],
)
def test_routing_tokens_of_media_replace_the_prompt_for_overlap(info: MmRoutingInfo | None, expected: Any) -> None:
    assert PreprocessedRequest([1, 2], mm_routing_info=info).block_mm_routing_info() == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {"kv_transfer_params": {"hint": 1}}),
        ({"x": 1}, {"x": 1, "kv_transfer_params": {"hint": 1}}),
        ({"kv_transfer_params": {"y": 2}}, {"kv_transfer_params": {"y": 2, "hint": 1}}),
        ({"kv_transfer_params": {"hint": 0}}, {"kv_transfer_params": {"hint": 1}}),
        ({"x": 1, "kv_transfer_params": "text"}, {"x": 1, "kv_transfer_params": {"hint": 1}}),
        ([1], {"kv_transfer_params": {"hint": 1}}),
    ],
)
def test_a_router_hint_is_merged_and_other_keys_are_kept(before: Any, after: Any) -> None:
    request = PreprocessedRequest([1], extra_args=before)
    request.attach_router_hint({"hint": 1})
    assert request.extra_args == after


def test_ignore_eos_drops_every_stop_list_and_nothing_else() -> None:
    full = StopConditions(5, ["a"], [1], [2], [3], 1, True, 7)
    full.apply_ignore_eos()
    assert full == StopConditions(5, None, None, None, None, 1, True, 7)


@pytest.mark.parametrize("ignore_eos", [None, False])
def test_stop_lists_stay_without_ignore_eos(ignore_eos: bool | None) -> None:
    stops = StopConditions(5, ["a"], [1], [2], [3], ignore_eos=ignore_eos)
    stops.apply_ignore_eos()
    assert stops == StopConditions(5, ["a"], [1], [2], [3], ignore_eos=ignore_eos)


def test_force_greedy_clears_what_would_draw_differently() -> None:
    options = SamplingOptions(2, 3, 0.1, 0.2, 0.3, 0.4, 0.5, 6, 0.7, True, 0.8, 9, True)
    options.force_greedy()
    assert options == SamplingOptions(
        2, 3, use_beam_search=True, length_penalty=0.8, seed=9, include_stop_str_in_output=True
    )


KINDS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": "a+",
    "choice": ["a"],
    "grammar": "root",
    "whitespace_pattern": " ",
    "structural_tag": {},
}


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_only_one_kind_of_guided_decoding_may_be_given(first: str, second: str) -> None:
    chosen: dict[str, Any] = {name: KINDS[name] for name in (first, second)}
    if first == second:
        assert GuidedDecodingOptions(backend="b", **chosen).kinds() == [first]
        return
    with pytest.raises(InvalidRecord, match="only one kind"):
        GuidedDecodingOptions(**chosen)


@pytest.mark.parametrize("given_options", [{}, {"choice": []}, {"backend": "b"}, {"backend": "b", "choice": []}])
def test_no_kind_of_guided_decoding_is_no_guided_decoding(given_options: dict[str, Any]) -> None:
    assert GuidedDecodingOptions.from_optional(**given_options) is None


def test_guided_decoding_without_a_kind_is_valid() -> None:
    assert GuidedDecodingOptions(backend="b", choice=[]).kinds() == []
    assert GuidedDecodingOptions.from_optional(regex="a", choice=[], backend="b") == GuidedDecodingOptions(
        regex="a", backend="b"
    )


@pytest.mark.parametrize("pair", ["()", "[]", "{}"])
def test_a_grammar_may_be_nested_500_levels_and_no_deeper(pair: str) -> None:
    GuidedDecodingOptions(grammar="x" + pair[0] * 500)
    GuidedDecodingOptions(grammar=pair * 501)
    with pytest.raises(InvalidRecord) as refused:
        GuidedDecodingOptions(grammar=pair[0] * 501)
    assert refused.value.field == "grammar"


@pytest.mark.parametrize(
    ("given_values", "place"),
    [
        ({"overlap_score_credit": -0.1}, "overlap_score_credit"),
        ({"overlap_score_credit": float("nan")}, "overlap_score_credit"),
        ({"overlap_score_credit": float("inf")}, "overlap_score_credit"),
        ({"prefill_load_scale": -1.0}, "prefill_load_scale"),
        ({"router_temperature": -0.5}, "router_temperature"),
        ({"shared_cache_multiplier": 1.1}, "shared_cache_multiplier"),
        ({"shared_cache_multiplier": -0.1}, "shared_cache_multiplier"),
        ({"overlap_score_weight": -1.0}, "overlap_score_weight"),
    ],
)
def test_a_router_override_out_of_range_is_refused_when_read(given_values: dict[str, float], place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain({"token_ids": [], "router_config_override": given_values}, PreprocessedRequest)
    assert refused.value.field == f"router_config_override.{place}"


@pytest.mark.parametrize(
    "plain", [{"overlap_score_credit": 1.5, "shared_cache_multiplier": 1}, {"prefill_load_scale": 0}]
)
def test_a_router_override_may_be_over_one_or_zero(plain: dict[str, float]) -> None:
    assert to_plain(from_plain(plain, RouterConfigOverride)).items() >= plain.items()


@pytest.mark.parametrize(
    ("weight", "credit", "expected_credit"), [(2.0, None, None), (2.0, 0.5, 0.5), (0.0, 0.5, 0.0), (0.0, None, 0.0)]
)
def test_the_older_overlap_weight_sets_the_load_scale(
    weight: float, credit: float | None, expected_credit: float | None
) -> None:
    plain = {"overlap_score_weight": weight, "prefill_load_scale": 9.0, "overlap_score_credit": credit}
    override = from_plain(plain, RouterConfigOverride)
    assert (override.prefill_load_scale, override.overlap_score_credit) == (weight, expected_credit)
    assert "overlap_score_weight" not in to_plain(override)


def test_routing_constraints_know_when_they_are_empty() -> None:
    assert RoutingConstraints().is_empty
    assert not RoutingConstraints({"a"}).is_empty
    assert not RoutingConstraints(set(), {"a": -1.0}).is_empty


@pytest.mark.parametrize(
    ("wire", "value", "written"),
    [
        ({"Url": "https://h/p"}, MultimodalData("Url", "https://h/p"), {"Url": "https://h/p"}),
        ({"Url": "data:image/png;base64,AA"}, MultimodalData("Url", "data:image/png;base64,AA"), None),
        ({"RawUrl": "file"}, MultimodalData("RawUrl", "file"), {"Url": "file"}),
        ({"Decoded": {"shape": [1]}}, MultimodalData("Decoded", {"shape": [1]}), None),
        ({"UuidOnly": "u"}, MultimodalData("UuidOnly", "u"), None),
    ],
)
def test_media_is_an_object_with_its_kind_as_the_one_key(wire: Any, value: MultimodalData, written: Any) -> None:
    assert from_plain(wire, MultimodalData) == value
    assert to_plain(value) == (written or wire)


@pytest.mark.parametrize(
    "wire",
    [
        *({}, "Url", None, {"Url": "a:b", "UuidOnly": "u"}, {"Other": "x"}, {"Url": 1}, {"UuidOnly": None}),
        *({"Decoded": "x"}, {"Url": "no-scheme"}, {"Url": "http://"}, {"Url": "http:/x"}, {"Url": "http://a b"}),
    ],
)
def test_what_is_no_media_is_refused(wire: Any) -> None:
    with pytest.raises(InvalidArgument):
        from_plain(wire, MultimodalData)
