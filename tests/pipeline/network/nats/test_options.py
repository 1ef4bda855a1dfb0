"""Addresses and the login."""

from __future__ import annotations

from random import Random

import pytest

from pipeline import InvalidArgument
from pipeline.network.backends import Site, planes_at
from pipeline.network.nats import NatsObjects, NatsOptions, NatsStore, parse_addresses, parse_replicas
from pipeline.rx import AnyIOScheduler


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


def test_copies_in_a_cluster_stand_behind_the_addresses() -> None:
    assert parse_replicas("nats://one,two,three?replicas=3") == ("nats://one,two,three", 3)
    assert parse_replicas("nats://user:pass@one") == ("nats://user:pass@one", 1)
    for wrong in ("?replicas=2", "?replicas=", "?replicas=03", "?copies=3", "?replicas=3&a=b", "?replicas=-1"):
        with pytest.raises(InvalidArgument) as refused:
            parse_replicas(f"nats://secret@one{wrong}")
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("query", "replicas"), [("", 1), ("?replicas=3", 3)])
async def test_what_a_runtime_stores_has_the_copies_of_its_url(query: str, replicas: int) -> None:
    async with AnyIOScheduler() as scheduler:
        site = Site(scheduler, Random(1), 10.0, lambda: 0, None)
        planes = planes_at(f"nats://one,two{query}", site, None)
        assert isinstance(planes.store, NatsStore)
        assert isinstance(planes.objects, NatsObjects)
        assert (planes.store._bucket.replicas, planes.objects._replicas) == (replicas, replicas)
