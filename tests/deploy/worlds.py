"""What `deploy/` makes: containers with their programs, of the Kubernetes manifests and of the compose file."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml  # type: ignore[import-untyped]
from attrs import field, frozen

from engines import ShutdownTimes
from serving.cli import commands
from serving.cli.app import program
from serving.cli.commands import run_program
from serving.server import GRACE, HAND_OVER
from serving.variables import names, unread

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
Manifest = dict[str, Any]

CLOSE_S = 10.0
"""What the end of `serve` may take beside its grace, as in `serving.program`; of a worker, what its process takes."""


@frozen
class Container:
    """A container that runs a program of ours."""

    name: str
    args: Sequence[str]
    environment: Mapping[str, str]
    ends_in_s: float
    """Seconds between the signal that ends it and the one that kills it."""
    ports: Mapping[str, int] = field(factory=dict)

    @property
    def needs_s(self) -> float:
        """Seconds that its program may take to end."""
        times = ShutdownTimes.from_environment(self.environment)
        if self.args[0] == "serve":
            own_s = (HAND_OVER.of(self.environment) or 0.0) + GRACE.of(self.environment)
        else:
            own_s = times.grace_s
        return own_s + times.timeout_s + CLOSE_S


@cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """Return the manifests of an overlay as `kubectl apply -k` would send them."""
    kubectl = Path(sys.executable).parent / "kubectl"
    folder = KUBERNETES / "overlays" / overlay
    done = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60, env={"HOME": "/tmp"}
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [manifest for manifest in rendered(overlay) if manifest["kind"] in kinds]


def pods(overlay: str) -> dict[str, Manifest]:
    """Return the pod templates of the workloads, by the workload's name."""
    return {
        each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(overlay, "Deployment", "StatefulSet")
    }


def containers_of(template: Manifest) -> list[Manifest]:
    """Return all containers of a pod, its sidecars included."""
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def ours_in_pods(overlay: str) -> Iterator[Container]:
    """Yield the containers of an overlay that run a program of ours."""
    for template in pods(overlay).values():
        spec = template["spec"]
        for each in containers_of(template):
            if each["image"].partition(":")[0] != "penstock":
                continue
            yield Container(
                each["name"],
                each["args"],
                {one["name"]: str(one.get("value", "1")) for one in each["env"]},
                spec["terminationGracePeriodSeconds"],
                {port["name"]: port["containerPort"] for port in each["ports"]},
            )


def compose() -> Manifest:
    """Return the compose file, its anchors resolved."""
    with (DEPLOY / "compose.yaml").open(encoding="utf-8") as file:
        loaded: Manifest = yaml.safe_load(file)
    return loaded


def ours_in_compose() -> Iterator[Container]:
    """Yield the services of the compose file that run a program of ours."""
    for name, service in compose()["services"].items():
        if service["image"].partition(":")[0] == "penstock":
            ends_in_s = float(service["stop_grace_period"].removesuffix("s"))
            yield Container(name, service["command"], service["environment"], ends_in_s)


def wrong_settings(container: Container) -> list[str]:
    """Return what the program would refuse of its arguments and variables, and the variables that nothing reads."""
    output, errors = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, container.environment, clear=True), redirect_stdout(output), redirect_stderr(errors):
        try:
            code: object = run_program(program, ["config", *container.args])
        except SystemExit as ended:
            code = ended.code
    known = {one.variable for each in commands.values() for one in each.settings().values()} | names()
    failed = [f"exit code {code}"] if code else []
    return [*errors.getvalue().splitlines(), *failed, *unread(container.environment, known)]


def wrong_ends(container: Container) -> list[str]:
    """Return a line if the container is killed before its program may have ended."""
    left_s, needs_s = container.ends_in_s, container.needs_s
    return [] if left_s >= needs_s else [f"{container.name}: {left_s:g} s to end, of {needs_s:g} s"]
