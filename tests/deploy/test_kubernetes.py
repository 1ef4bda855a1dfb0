"""The Kubernetes manifests: valid by the schemas of Kubernetes, and true of the programs they run."""

from __future__ import annotations

import re
from collections.abc import Mapping

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from attrs import evolve

from serving.deployment import GraphConfig, HostOptions, hosted_graph
from serving.http import HttpOptions, Telemetry, app
from tests.deploy.worlds import (
    KUBERNETES,
    OVERLAYS,
    Manifest,
    containers_of,
    of_kind,
    ours_in_pods,
    pods,
    rendered,
    wrong_ends,
    wrong_settings,
)
from tests.serving.worlds import chat

OLDEST, NEWEST = "1.33", "1.37"
"""The oldest release that has all features of the manifests switched on, and the newest one known."""


def not_listed(folder: Mapping[str, str]) -> list[str]:
    """Return the YAML files beside a kustomization that it does not use, by the texts of the files."""
    used = yaml.safe_load(folder["kustomization.yaml"])
    names = {*used.get("resources", ()), *(patch["path"] for patch in used.get("patches", ()))}
    return sorted(set(folder) - names - {"kustomization.yaml"})


def unmatched(selector: Mapping[str, str], templates: Mapping[str, Manifest]) -> bool:
    """Return whether no pod has these labels."""
    return not any(selector.items() <= each["metadata"]["labels"].items() for each in templates.values())


@pytest.mark.parametrize("version", [OLDEST, pytest.param(NEWEST, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_what_the_schemas_of_kubernetes_allow(overlay: str, version: str) -> None:
    for manifest in rendered(overlay):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_refused() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, OLDEST, strict=True)


def test_every_file_beside_a_kustomization_is_in_it() -> None:
    found = list(KUBERNETES.rglob("kustomization.yaml"))
    for path in found:
        folder = {each.name: each.read_text(encoding="utf-8") for each in path.parent.glob("*.yaml")}
        assert not_listed(folder) == [], path
    assert len(found) == 1 + len(OVERLAYS)
    assert not_listed({"kustomization.yaml": "resources: [a.yaml]", "a.yaml": "", "b.yaml": ""}) == ["b.yaml"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_programs_take_their_arguments_and_read_their_variables(overlay: str) -> None:
    found = list(ours_in_pods(overlay))
    assert {each.args[0] for each in found} == {"serve", "worker"}
    for each in found:
        assert wrong_settings(each) == []


def test_wrong_arguments_and_variables_are_found() -> None:
    each = next(ours_in_pods(OVERLAYS[0]))
    assert wrong_settings(evolve(each, args=["serve", "--rooter", "kv"]))
    assert wrong_settings(evolve(each, environment={"DYN_HTTP_BODY_LIMIT_MB": "many"}))
    assert wrong_settings(evolve(each, environment={"PENSTOCK_RUNTME": "nats://nats"}))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_the_time_that_their_programs_may_take_to_end(overlay: str) -> None:
    assert [line for each in ours_in_pods(overlay) for line in wrong_ends(each)] == []


def test_a_grace_period_that_is_too_short_is_found() -> None:
    each = next(ours_in_pods(OVERLAYS[0]))
    assert wrong_ends(evolve(each, ends_in_s=each.needs_s)) == []
    assert wrong_ends(evolve(each, ends_in_s=each.needs_s - 1.0))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_a_path_and_a_port_that_the_program_has(overlay: str) -> None:
    paths = {HttpOptions().health_path, HttpOptions().live_path}
    for template in pods(overlay).values():
        for container in containers_of(template):
            probes = [container[f"{name}Probe"] for name in ("startup", "liveness") if f"{name}Probe" in container]
            assert len(probes) == 2, container["name"]
            ports = {port["name"] for port in container.get("ports", ())}
            for probe in (*probes, container.get("readinessProbe", {})):
                if get := probe.get("httpGet"):
                    assert get["port"] in ports
                    assert get["path"] in paths or container["name"] == "nats"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_variables_of_addresses_and_ports_agree_with_the_ports_of_the_container(overlay: str) -> None:
    for each in ours_in_pods(overlay):
        shown = {
            name: each.environment.get(variable)
            for name, variable in (
                ("http", "PENSTOCK_PORT"),
                ("admin", "PENSTOCK_ADMIN_PORT"),
                ("status", "DYN_SYSTEM_PORT"),
            )
        }
        assert {name: int(port) for name, port in shown.items() if port is not None} == each.ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_match_pods_and_targets_exist(overlay: str) -> None:
    templates = pods(overlay)
    selectors = [each["spec"]["selector"] for each in of_kind(overlay, "Service")]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(overlay, "PodDisruptionBudget")]
    selectors += [
        each["spec"]["podSelector"]["matchLabels"]
        for each in of_kind(overlay, "NetworkPolicy")
        if each["spec"]["podSelector"]
    ]
    assert len(selectors) >= 6
    assert [each for each in selectors if unmatched(each, templates)] == []
    for each in of_kind(overlay, "HorizontalPodAutoscaler"):
        assert each["spec"]["scaleTargetRef"]["name"] in templates
    assert unmatched({"app.kubernetes.io/name": "frontend"}, templates)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_are_bounded_and_without_privileges(overlay: str) -> None:
    for template in pods(overlay).values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        for container in containers_of(template):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


async def test_workers_are_scaled_by_a_metric_that_a_front_end_shows() -> None:
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus_adapter.yaml").read_text(encoding="utf-8"))["externalRules"]
    scaled = [
        metric["external"]["metric"]["name"]
        for each in of_kind("vllm", "HorizontalPodAutoscaler")
        for metric in each["spec"]["metrics"]
        if metric["type"] == "External"
    ]
    assert scaled == [rule["name"]["as"]]
    telemetry = Telemetry()
    async with hosted_graph(GraphConfig(model_name="m"), HostOptions({})) as opened:
        await chat(app(opened.graph, telemetry=telemetry)).run()
    metric = rule["seriesQuery"].partition("{")[0]
    assert re.search(rf"^{metric}{{", telemetry.text().decode(), re.MULTILINE)
