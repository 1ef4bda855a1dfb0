"""What reaches a terminal cannot steer it, wherever the text came from."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from serving.log_format import log_to_stderr
from serving.replay import Report, Samples, comparison_text, make_report, report_text
from serving.replay.report import ErrorReport
from serving.terminal import echo, printable, table_width

RED = "\x1b[31m"
HOSTILE = st.sampled_from("\x00\x07\x08\r\x1b\x7f\x85\x9b\u2028\u202e\u2066\u200f\ud800\udfff")
TEXTS = st.text(HOSTILE | st.characters() | st.sampled_from("ab \n\t"), max_size=40)


@given(TEXTS)
def test_no_character_that_steers_a_terminal_is_left(text: str) -> None:
    shown = printable(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert not set(shown) & set("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f")
    shown.encode()  # no halves of surrogate pairs either
    assert printable(shown) == shown
    assert shown.count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("grüße, 世界 🙂 ✓ │─▼", "grüße, 世界 🙂 ✓ │─▼"),
        ("👩‍👩‍👧\tx\ny", "👩‍👩‍👧\tx\ny"),
        (f"{RED}x", "\\x1b[31mx"),
        ("a\rb\x9bc", "a\\rb\\x9bc"),
        ("\udcff\u202etxt.exe", "\\udcff\\u202etxt.exe"),
    ],
)
def test_ordinary_text_stays_and_the_rest_is_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_name_that_is_no_unicode_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a\udcff", err=True)
    assert capsys.readouterr().err == "a\\udcff\n"


def test_a_table_is_as_wide_as_the_terminal_and_no_wider_than_120(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in (("80", 80), ("300", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert table_width() == width
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys, "__stdout__", None)
    assert table_width() == 120


def test_texts_of_a_report_cannot_steer_the_terminal() -> None:
    """Also where a program of one's own prints the table: the example comes from a server."""
    made = evolve(make_report(Samples()), errors=[ErrorReport("Disconnected", 1, f"{RED}gone\u2028x")])
    assert "\x1b" not in report_text(made)
    assert "\\x1b[31mgone\\u2028x" in report_text(made)
    named = [(f"{RED}[/bold] :smile:", evolve(made, settings={"trace": f"{RED}a"})), ("b", made)]
    text = comparison_text(named)
    assert "\x1b" not in text
    assert "[/bold] :smile:" in text


def test_messages_of_the_log_are_a_line_each_and_steer_nothing() -> None:
    root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
    root.handlers.clear()
    try:
        log_to_stderr("INFO")
        (handler,) = root.handlers
        record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": f"{RED}a\nERROR n: forged"})
        assert handler.format(record) == "INFO n: \\x1b[31ma\\nERROR n: forged"
        try:
            raise ValueError(f"{RED}b")
        except ValueError:
            record.exc_info = sys.exc_info()
        text = handler.format(record)
        assert "\x1b" not in text
        assert "\nValueError: \\x1b[31mb" in text
    finally:
        root.handlers[:] = handlers


def test_the_json_of_a_report_keeps_its_texts() -> None:
    made = evolve(make_report(Samples()), settings={"trace": f"{RED}a"})
    assert json.loads(made.to_json())["settings"]["trace"] == f"{RED}a"
    assert Report.from_json(made.to_json()).settings == made.settings
