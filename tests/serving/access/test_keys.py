"""Keys: what is accepted as one, where they come from, how fast they may be used."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.access import SHORTEST_KEY, ApiKey, KeyRing, WatchedFiles, all_keys, hash_of, key_ring, new_key, table_of
from serving.access.key_ring import Bucket

KEY = "penstock-0123456789abcdefghijklmnopqrstuv"


def table(name: str, key: str = KEY, *lines: str) -> str:
    return "\n".join(["[[key]]", f'name = "{name}"', f'hash = "{hash_of(key)}"', *lines]) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


# -- what a key is


def test_a_new_key_is_accepted_and_no_other_like_it() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(hash_of(each).startswith("sha256:") for each in made)


@pytest.mark.parametrize("bad", ["", "short", "a" * (SHORTEST_KEY - 1), "a" * 600, "a b" * 20, "a,b" * 20, "ä" * 40])
def test_a_text_that_is_no_safe_key_is_refused_without_being_shown(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="visible ASCII") as refused:
        hash_of(bad)
    assert not bad or bad not in str(refused.value)


def test_the_command_prints_a_key_and_a_table_that_knows_it(file: Path) -> None:
    command = [sys.executable, "-m", "serving", "key", "new", "--name", "search"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    key = printed.stderr.strip()
    file.write_text(printed.stdout, encoding="utf-8")
    held = KeyRing(all_keys(file, {})).find(key.encode())
    assert held is not None
    assert held.key.name == "search"
    assert key not in printed.stdout  # which goes into a file


def test_the_command_hashes_a_key_from_standard_input_and_refuses_a_short_one() -> None:
    command = [sys.executable, "-m", "serving", "key", "hash"]
    printed = subprocess.run(command, input=f"{KEY}\n", capture_output=True, text=True, check=True, timeout=30).stdout
    assert tomllib.loads(printed)["key"][0]["hash"] == hash_of(KEY)
    refused = subprocess.run(command, input="secret", capture_output=True, text=True, check=False, timeout=30)
    assert (refused.returncode, "secret" in refused.stderr + refused.stdout) == (2, False)


def test_a_table_is_not_made_of_a_name_that_the_file_could_not_have() -> None:
    with pytest.raises(InvalidArgument, match="must be 1 to 64 letters") as refused:
        table_of("a b", KEY)
    assert (refused.value.field, refused.value.__cause__) == ("name", None)
    assert tomllib.loads(table_of("a", KEY)) == tomllib.loads(table("a"))


# -- where keys come from


def test_a_file_gives_each_key_what_its_table_has(file: Path) -> None:
    file.write_text(
        table("a", KEY, 'models = ["m"]', "requests_per_minute = 60", "tokens_per_minute = 1e6", "priority = 5")
        + 'tenant = "t"\nprivileges = ["pin", "admin"]\n'
        + table("b", new_key()),
        encoding="utf-8",
    )
    first, second = all_keys(file, {})
    assert first == ApiKey(
        name="a",
        hash=hash_of(KEY),
        models=["m"],
        requests_per_minute=60,
        tokens_per_minute=1e6,
        priority=5,
        tenant="t",
        privileges=["pin", "admin"],
    )
    assert (second.models, second.priority, second.privileges) == (None, None, [])


def test_the_variable_holds_one_plain_key_or_several(file: Path) -> None:
    other = new_key()
    ring = KeyRing(all_keys(None, {"PENSTOCK_API_KEY": f"{KEY}, {other}"}))
    assert ring.find(KEY.encode()) is not None
    assert ring.find(other.encode()) is not None
    file.write_text(table("a", new_key()), encoding="utf-8")
    assert len(all_keys(file, {"PENSTOCK_API_KEY": KEY})) == 2


def test_without_file_and_variable_there_are_no_keys() -> None:
    assert all_keys(None, {"PENSTOCK_API_KEY": " , "}) == []


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "key: is required"),
        ("key = []", "holds no key"),
        ("key = 3", "key"),
        ("[[key]\n", "no TOML"),
        ('[[key]]\nname = "a"', "hash: is required"),
        (f'[[key]]\nname = "a"\nhash = "{KEY}"', "sha256"),
        (f'[[key]]\nname = "a"\nkey = "{KEY}"\nhash = "x"', "is not a known field"),
        (table("a b"), "letters"),
        (table("a", KEY, "priority = true"), "priority"),
        (table("a", KEY, "requests_per_minute = 0"), "between 1"),
        (table("a", KEY, "tokens_per_minute = nan"), "between 1"),
        (table("a", KEY, 'privileges = ["root"]'), "privileges"),
        (table("a", KEY, 'tenant = "a/b"'), "letters"),
        (table("a") + table("a", new_key()), "the name of 'a'"),
        (table("a") + table("b"), "the hash of 'a'"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_its_name_and_shows_no_key(content: str, what: str, file: Path) -> None:
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidArgument, match=what) as refused:
        all_keys(file, {})
    assert refused.value.field == "api_keys"
    assert str(refused.value).startswith(str(file))
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("variables", [{"PENSTOCK_API_KEY": "secret"}, {"PENSTOCK_API_KEYS": KEY}])
def test_a_variable_that_cannot_be_is_refused_and_not_shown(variables: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="PENSTOCK_API_KEY") as refused:
        all_keys(None, variables)
    assert not any(value in str(refused.value) for value in variables.values())


# -- finding a key


@given(st.binary(max_size=700))
def test_only_the_bytes_of_a_key_find_it(sent: bytes) -> None:
    ring = KeyRing([ApiKey(name="a", hash=hash_of(KEY))])
    assert ring.find(sent) is None
    assert ring.find(KEY.encode() + sent) is None or not sent


def test_no_key_a_wrong_one_and_the_right_one_take_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing([ApiKey(name="a", hash=hash_of(KEY))])
    steps: list[str] = []

    def noted(name: str) -> None:
        step = getattr(key_ring, name)

        def do(*values: bytes) -> Any:
            steps.append(name)
            return step(*values)

        monkeypatch.setattr(key_ring, name, do)

    noted("digest_of")
    noted("compare_digest")
    for sent in ("", "x", KEY[:-1], KEY, "a" * 10_000):
        steps.clear()
        ring.find(sent.encode())
        assert steps == ["digest_of", "compare_digest"]


def test_a_key_is_found_among_ten_thousand() -> None:
    keys = [new_key() for _ in range(10_000)]
    ring = KeyRing([ApiKey(name=str(number), hash=hash_of(key)) for number, key in enumerate(keys)])
    found = ring.find(keys[4321].encode())
    assert found is not None
    assert found.key.name == "4321"


def test_the_longest_key_is_found_and_one_that_goes_on_is_not() -> None:
    longest = "a" * 512
    ring = KeyRing([ApiKey(name="a", hash=hash_of(longest))])
    assert ring.find(longest.encode()) is not None
    assert ring.find(longest.encode() + b"a") is None


# -- rates


def test_a_clock_that_goes_back_fills_no_bucket() -> None:
    bucket = Bucket(60)
    bucket.take(1000, 60)
    assert [bucket.used(now_s) for now_s in (1000, 900, 0, 1000)] == [60] * 4
    assert bucket.used(1001) == 59


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.floats(-5, 30), st.integers(1, 20)), max_size=100),
)
def test_a_bucket_never_gives_more_than_its_rate_and_one_minutes_worth(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """The clock may even go back."""
    bucket, now, latest, given_out = Bucket(per_minute), 100.0, 100.0, 0
    bucket.used(now)
    for step_s, amount in steps:
        now += step_s
        latest = max(latest, now)
        if bucket.wait_s(now, amount) == 0:
            bucket.take(now, amount)
            given_out += amount
        assert given_out <= per_minute + (latest - 100.0) * per_minute / 60 + 1e-6


@given(st.integers(1, 1000), st.integers(0, 5000))
def test_a_bucket_has_what_is_waited_for_when_the_wait_is_over(per_minute: int, used: int) -> None:
    bucket = Bucket(per_minute)
    bucket.take(0, used)
    assert bucket.wait_s(bucket.wait_s(0, 1) + 1e-6, 1) == 0


def test_a_key_that_keeps_its_name_keeps_what_it_has_used() -> None:
    slow = ApiKey(name="a", hash=hash_of(KEY), requests_per_minute=2, tokens_per_minute=100)
    ring = KeyRing([slow])
    held = ring.find(KEY.encode())
    assert held is not None
    assert [held.admit(0), held.admit(0)] == [None, None]
    other = new_key()
    ring.replace([evolve(slow, hash=hash_of(other))])
    assert ring.find(KEY.encode()) is None
    changed = ring.find(other.encode())
    assert changed is not None
    assert changed.admit(0) is not None
    held.spend(0, 100)  # a request that began with the former key
    assert changed.tokens is not None
    assert changed.tokens.used(0) == 100


# -- files that change


def test_a_changed_file_changes_the_keys_and_a_broken_one_leaves_them(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(table("a"), encoding="utf-8")
    ring = KeyRing(all_keys(file, {}))

    def load() -> object:
        changed = all_keys(file, {})
        return lambda: ring.replace(changed)

    watched = WatchedFiles("API keys", [file], load)  # type: ignore[arg-type]
    anyio.run(watched.check)
    other = new_key()
    for content, valid in ((table("b", other), other), ("", other), ("key = []", other), (table("a"), KEY)):
        _write(file, content)
        anyio.run(watched.check)
        assert [key for key in (KEY, other) if ring.find(key.encode())] == [valid]
    file.unlink()
    anyio.run(watched.check)
    anyio.run(watched.check)
    assert ring.find(KEY.encode()) is not None
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "ERROR", "ERROR", "WARNING", "ERROR"]


def _write(file: Path, content: str) -> None:
    """Replace the file, with a time of its own: two writes may fall into one tick of the file system's clock."""
    before = file.stat().st_mtime_ns
    file.write_text(content, encoding="utf-8")
    os.utime(file, ns=(before + 10**9, before + 10**9))
