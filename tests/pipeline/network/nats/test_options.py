"""Addresses and the login."""

from __future__ import annotations

import pytest

from pipeline import InvalidArgument
from pipeline.network.nats import NatsOptions, parse_addresses


def test_several_servers_have_one_text_or_several() -> None:
    found = parse_addresses("nats://a:1,b,tls://c:3")
    assert list(map(str, found)) == ["nats://a:1", "nats://b:4222", "tls://c:3"]
    assert parse_addresses(["nats://a:1", "nats://b", "tls://c:3"]) == found
    assert str(parse_addresses("nats://[::1]:7")[0]) == "nats://[::1]:7"


def test_a_login_is_taken_out_of_the_address() -> None:
    user, token = parse_addresses("nats://me:p%40ss@a:1,nats://t%2Fken@b")
    assert (user.user, user.password, user.token) == ("me", "p@ss", None)
    assert (token.user, token.password, token.token) == (None, None, "t/ken")


def test_no_secret_is_in_a_text() -> None:
    shown = f"{parse_addresses('nats://me:hidden@a,hidden@b')!r} {NatsOptions(token='hidden', password='hidden')!r}"
    assert "hidden" not in shown


@pytest.mark.parametrize(
    "url", ["", "nats://", "http://hidden@a", "nats://hidden@a:port", "nats://a/hidden", "nats://a:99999", "nats://a?b"]
)
def test_what_is_no_address_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_addresses(url)
    assert "hidden" not in str(refused.value)


def test_no_address_and_no_time_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        parse_addresses([])
    with pytest.raises(InvalidArgument, match="heartbeat_s"):
        NatsOptions(heartbeat_s=0)
