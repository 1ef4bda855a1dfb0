"""The options of servers behind a graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import InvalidArgument
from serving.__main__ import main as program
from serving.cli import main
from serving.settings import UPSTREAM_API_KEY, UpstreamOptions

ONE, TWO = "http://gpu-1:8000", "http://gpu-2:8000"


def test_without_servers_there_are_none() -> None:
    assert UpstreamOptions().config({UPSTREAM_API_KEY: "k"}) is None


def test_every_option_is_in_the_config(tmp_path: Path) -> None:
    options = UpstreamOptions(
        upstream=(ONE,),
        prefill_upstream=(TWO,),
        upstream_kind="vllm",
        kv_connector="mooncake",
        kv_lease_s=60.0,
        upstream_model_path=(f"a=b={tmp_path}", "d=."),
    )
    made = options.config({UPSTREAM_API_KEY: " secret "})
    assert made is not None
    assert (made.urls, made.prefill_urls, made.kind) == ((ONE,), (TWO,), "vllm")
    assert (made.connector, made.lease_s, made.api_key) == ("mooncake", 60.0, "secret")
    assert made.model_paths == {"a=b": tmp_path, "d": Path()}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"upstream_kind": "vllm"}, "upstream_kind"),
        ({"kv_connector": "lmcache"}, "kv_connector"),
        ({"kv_lease_s": 1.0}, "kv_lease_s"),
        ({"upstream_model_path": ("a=b",)}, "upstream_model_path"),
        ({"upstream": (ONE,), "upstream_model_path": ("b",)}, "upstream_model_path"),
        ({"upstream": (ONE,), "upstream_model_path": ("a=",)}, "upstream_model_path"),
        ({"upstream": (ONE,), "upstream_model_path": ("a=.", "a=.")}, "upstream_model_path"),
        ({"upstream": (ONE,), "upstream_model_path": ("a=/nowhere",)}, "upstream_model_path"),
        ({"upstream": (ONE,), "kv_connector": "mooncake"}, "kv_connector"),
        ({"upstream": (ONE,), "kv_lease_s": 4.0}, "kv_lease_s"),
        ({"prefill_upstream": (ONE,)}, "upstream"),
        ({"upstream": (ONE,), "kv_lease_s": 0.0}, "kv_lease_s"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        UpstreamOptions(**given).config({})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--upstream", "gpu-1"], "--upstream: expected a URL such as http://127.0.0.1:8000, got 'gpu-1'"),
        (["--upstream", ONE, "--upstream", f"{ONE}/"], f"--upstream: {ONE} is given twice"),
        (["--upstream", ONE, "--engine", "mocker"], "--engine: does not go with upstream servers"),
        (["--upstream", ONE, "--workers", "3"], "--workers: does not go with upstream servers"),
        (["--upstream", ONE, "--enforce-disagg"], "--enforce-disagg: there are no prefill workers to insist on"),
        (["--upstream-kind", "tgi"], "--upstream-kind: must be one of auto, vllm, sglang, openai"),
        (["--kv-lease-s", "5"], "--kv-lease-s: goes with --upstream"),
    ],
)
def test_the_program_names_the_option(
    options: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "serve", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert error in capsys.readouterr().err


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.deployment.upstream_config.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["penstock", "serve", "--upstream", ONE])
    with pytest.raises(SystemExit) as end:
        program()
    assert (
        end.value.code == "penstock: zmq is missing; install the program with: pip install 'penstock[serve,upstream]'"
    )
