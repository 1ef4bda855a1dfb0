"""What a report shows of the settings it was made with: nothing that may be a secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.deployment import GraphConfig
from serving.replay import SyntheticLoad, sweep, sweep_runs
from serving.replay.sweeping import ReportsFolder
from serving.secrets import NOT_SHOWN, shown_engine_args, shown_environment

SECRET = "sk-live-0123456789"
ENGINE = """
from pathlib import Path
from typing import Literal

from engines import EchoEngine

class Keyed(EchoEngine):
    shown_texts = ("device",)

    def __init__(
        self,
        api_key: str = "",
        token: int = 0,
        device: str = "cpu",
        mode: Literal["fast", "careful"] = "fast",
        folder: Path = Path("."),
        retries: int | None = None,
        rate: "float | str" = 1.0,
        warm: bool = False,
        untyped=None,
        **others,
    ):
        super().__init__()
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "keyed_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "keyed_engine:Keyed"


def test_the_environment_shows_numbers_switches_and_settings_of_the_router() -> None:
    shown = {
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.25",
        "DYN_MIGRATION_LIMIT": "3",
        "DYN_ROUTER_PLACEMENT": "least_cost",
        "DYN_USE_KV_EVENTS": "false",
    }
    hidden = {
        "DYN_API_KEY": SECRET,
        "DYN_HEALTH_CHECK_PAYLOAD": json.dumps({"token": SECRET}),
        "DYN_NUMBER_TOKEN": "123456",
        "DYN_OF_SOMEBODY_ELSE": SECRET,
        "DYN_ROUTER_SECRET": SECRET,
        "DYN_URL": f"https://u:{SECRET}@host/",
    }
    assert shown_environment(shown | hidden) == shown | dict.fromkeys(hidden, NOT_SHOWN)
    assert list(shown_environment(hidden | shown)) == sorted(shown | hidden)


@given(name=st.from_regex(r"DYN_[A-QS-Z][A-Z_]{0,20}", fullmatch=True), text=st.text())
def test_a_text_of_an_unknown_variable_is_never_shown(name: str, text: str) -> None:
    shown = shown_environment({name: text})[name]
    if shown != NOT_SHOWN:
        assert shown.strip().lower() in {"true", "false", "yes", "no", "on", "off", "none"} or set(
            shown.strip().lower()
        ) <= set("0123456789.e+-")


def test_an_engine_of_ones_own_shows_what_it_declares_harmless(engine: str) -> None:
    shown = {
        "device": "cuda",
        "mode": "careful",
        "folder": "/models/llama",
        "retries": "none",
        "rate": "2.5",
        "warm": "true",
    }
    hidden = {"api_key": SECRET, "token": "123456", "untyped": SECRET, "more": SECRET}
    assert shown_engine_args(engine, shown | hidden) == shown | dict.fromkeys(hidden, NOT_SHOWN)
    assert shown_engine_args(engine, {"rate": SECRET, "mode": SECRET}) == {"rate": NOT_SHOWN, "mode": NOT_SHOWN}


def test_our_engines_show_all() -> None:
    args = {"block_size": "64", "engine_type": "sglang", "aic_backend": "vllm"}
    assert shown_engine_args("mocker", args) == args


def test_a_sweep_repeats_a_run_whose_settings_are_incomplete(engine: str, tmp_path: Path) -> None:
    load = SyntheticLoad(input_tokens=8, output_tokens=2, request_count=2, arrival_interval_ms=5)
    folder = tmp_path / "reports"
    for args, found in (({"device": "cuda"}, [False, True]), ({"api_key": SECRET}, [False, False])):
        runs = sweep_runs(GraphConfig(engine=engine, engine_args=args, seed=1), {"router": ["random"]}, load=load)
        again = [sweep(runs, jobs=1, folder=folder).results[0].is_found for _ in range(2)]
        assert again == found
        assert SECRET not in "".join(file.read_text() for file in folder.iterdir())
    assert ReportsFolder(folder).find("no.json", {}) is None
