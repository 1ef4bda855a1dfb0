"""Names of endpoints and instances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from pipeline.network import EndpointId, Instance
from pipeline.network.names import detect_device_type, matches_prefix
from pipeline.wire import from_json, to_json

NAMES = st.from_regex(r"[a-z0-9_-]+", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("namespace1/component1/endpoint1", ("namespace1", "component1", "endpoint1")),
        ("namespace.component.endpoint", ("namespace", "component", "endpoint")),
        ("namespace/component.endpoint", ("namespace", "component", "endpoint")),
        ("dyn://ns.comp.ep", ("ns", "comp", "ep")),
        ("  dyn://ns/comp/ep ", ("ns", "comp", "ep")),
        ("worker", ("NS", "worker", "E")),
        ("ns.worker", ("ns", "worker", "E")),
        ("ns/comp/a/b.c", ("ns", "comp", "a_b_c")),
        ("", ("NS", "C", "E")),
        ("/comp/", ("NS", "comp", "E")),
        ("ns//ep", ("ns", "C", "ep")),
    ],
)
def test_an_endpoint_is_read_from_text(text: str, parts: tuple[str, str, str]) -> None:
    assert EndpointId.parse(text) == EndpointId(*parts)


@given(NAMES, NAMES, NAMES)
def test_the_text_of_an_endpoint_reads_back(namespace: str, component: str, endpoint: str) -> None:
    where = EndpointId(namespace, component, endpoint)
    assert EndpointId.parse(str(where)) == where == EndpointId.parse(where.path)


@pytest.mark.parametrize("name", ["Upper", "with space", "ümlaut", "a*b", "a>b"])
@pytest.mark.parametrize("field", ["namespace", "component"])
def test_a_name_of_other_characters_is_refused(field: str, name: str) -> None:
    parts = {"namespace": "ns", "component": "comp", field: name}
    with pytest.raises(InvalidArgument) as caught:
        EndpointId(parts["namespace"], parts["component"], "ep").checked()
    assert caught.value.field == field


def test_the_default_names_are_valid() -> None:
    EndpointId.parse("").checked()


def test_nested_namespaces_and_free_endpoints_are_names() -> None:
    where = EndpointId("parent.child", "comp", "Any*Thing")
    assert where.checked() is where


def test_an_endpoint_has_a_name() -> None:
    with pytest.raises(InvalidArgument) as caught:
        EndpointId("ns", "comp", "").checked()
    assert caught.value.field == "endpoint"


@given(st.text(min_size=1), st.text(min_size=1))
def test_keys_of_different_endpoints_never_lie_under_each_other(one: str, other: str) -> None:
    here, there = (EndpointId("ns", "comp", name) for name in (one, other))
    assert matches_prefix(Instance.of(here, 1).key, there.path) == (one == other)


def test_an_instance_has_its_full_identity() -> None:
    instance = Instance.of(EndpointId("ns", "comp", "ep"), 255)
    assert str(instance) == "ns/comp/ep/255"
    assert instance.key == "ns/comp/ep/ff"
    assert instance.endpoint_id == EndpointId("ns", "comp", "ep")


@pytest.mark.parametrize("codec", ["msgpack", "json", None])
def test_an_instance_crosses_the_wire(codec: object) -> None:
    """The codec round-trips, and without the field it is unset."""
    instance = Instance("ns", "comp", "ep", 7, {"nats_tcp": "subject"}, "cuda", codec)  # type: ignore[arg-type]
    data = to_json(instance)
    assert (b"request_plane_codec" in data) == (codec is not None)
    assert from_json(data, Instance) == instance


@pytest.mark.parametrize("instance_id", ["1.5", "true", "-1", str(2**64), '"1"', "null"])
def test_an_instance_id_has_64_bits(instance_id: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        from_json(f'{{"namespace":"n","component":"c","endpoint":"e","instance_id":{instance_id}}}', Instance)
    assert caught.value.field == "instance_id"


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("ns/component", True),
        ("ns/component/x", True),
        ("ns/component2/x", False),
        ("ns", False),
    ],
)
def test_a_prefix_ends_between_slashes(key: str, matches: bool) -> None:
    assert matches_prefix(key, "ns/component") is matches
    assert matches_prefix(key, "")


@pytest.mark.parametrize(
    ("environment", "device"),
    [
        ({}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "none"}, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "void"}, "cpu"),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, "cpu"),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, "cpu"),
        ({"NVIDIA_VISIBLE_DEVICES": ""}, "cuda"),
        ({"NVIDIA_VISIBLE_DEVICES": "-1"}, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "void"}, "cpu"),
    ],
)
def test_the_device_type_follows_what_is_visible(environment: dict[str, str], device: str) -> None:
    assert detect_device_type(environment) == device
