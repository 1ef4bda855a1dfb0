"""What the options come to: which addresses are public, what is shown where, what is warned of."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline import InvalidArgument
from serving.access import Gate, TrustedProxies, is_loopback, new_key
from serving.server import listen
from serving.settings import AccessOptions
from tests.serving.access.worlds import Certificates

PUBLIC = ("0.0.0.0", "::")
LOOPBACK = ("127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "localhost")
KEYS = {"PENSTOCK_API_KEY": new_key()}


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    with listen(request.param, 0) as made:
        yield made


@pytest.mark.parametrize("listener", LOOPBACK, indirect=True)
def test_a_loopback_address_shows_all_and_warns_of_nothing(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(AccessOptions(), {})
    gate.warn(listener)
    assert is_loopback(listener)
    assert gate.shows_internals(listener)
    assert (gate.keys, gate.tls, bool(gate.proxies), gate.cors_origins) == (None, None, False, ())
    assert not caplog.records


@pytest.mark.parametrize("listener", PUBLIC, indirect=True)
def test_a_public_address_hides_internals_and_warns_where_there_are_no_keys(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(AccessOptions(), {})
    gate.warn(listener)
    assert not gate.shows_internals(listener)
    assert gate.admin_address(listener) is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "no API keys" in caplog.text
    assert "--admin-port" in caplog.text


@pytest.mark.parametrize("listener", PUBLIC, indirect=True)
def test_keys_without_tls_are_warned_of_on_a_public_address(
    listener: socket.socket, caplog: pytest.LogCaptureFixture, certificates: Certificates
) -> None:
    Gate(AccessOptions(), KEYS).warn(listener)
    assert "without TLS" in caplog.text
    caplog.clear()
    options = AccessOptions(tls_cert_path=certificates.cert, tls_key_path=certificates.key, admin_port=0)
    Gate(options, KEYS).warn(listener)
    assert not caplog.records


@pytest.mark.parametrize("listener", ["127.0.0.1"], indirect=True)
def test_a_proxy_makes_a_loopback_address_public(listener: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(AccessOptions(trusted_proxy=("127.0.0.1",)), {})
    gate.warn(listener)
    assert not gate.shows_internals(listener)
    assert "no API keys" in caplog.text


@pytest.mark.parametrize("listener", [*PUBLIC, "127.0.0.1"], indirect=True)
def test_an_admin_address_shows_internals_there_and_only_there(listener: socket.socket) -> None:
    gate = Gate(AccessOptions(admin_port=0), {})
    assert not gate.shows_internals(listener)
    assert gate.admin_address(listener) == ("127.0.0.1", 0)


@pytest.mark.parametrize("listener", PUBLIC, indirect=True)
def test_the_address_of_the_server_as_admin_address_shows_internals_on_it(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    gate = Gate(AccessOptions(admin_host=host, admin_port=port), {})
    assert gate.shows_internals(listener)
    assert gate.admin_address(listener) is None


@pytest.mark.parametrize("listener", PUBLIC, indirect=True)
def test_the_same_port_of_another_host_is_another_address(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    gate = Gate(AccessOptions(admin_port=port), {})
    assert not gate.shows_internals(listener)
    assert gate.admin_address(listener) == ("127.0.0.1", port)


def test_a_unix_socket_is_local(tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "s"))
        assert is_loopback(listener)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("admin_port", 65536),
        ("admin_port", -1),
        ("trusted_proxy", ("10.0.0.1/8",)),
        ("trusted_proxy", ("proxy.example",)),
        ("trusted_proxy", ("*",)),
        ("trusted_proxy", ("10.0.0.0/8", "0.0.0.0/0")),
        ("trusted_proxy", ("::/0",)),
        ("cors_origin", ("chat.example",)),
        ("cors_origin", ("https://chat.example/",)),
        ("cors_origin", ("https://user@chat.example",)),
        ("cors_origin", ("null",)),
        ("api_keys", Path("/nowhere/keys.toml")),
        ("tls_cert_path", Path("/nowhere/cert.pem")),
    ],
)
def test_an_option_that_cannot_be_is_named(field: str, given: Any) -> None:
    values: dict[str, Any] = {field: given} | (
        {"tls_key_path": Path("/nowhere/key.pem")} if field == "tls_cert_path" else {}
    )
    with pytest.raises(InvalidArgument) as refused:
        Gate(AccessOptions(**values), {})
    assert refused.value.field == field


def test_no_proxy_is_trusted_by_default() -> None:
    proxies = TrustedProxies()
    assert not any(proxies.trusted(address) for address in ("127.0.0.1", "::1", "", "unknown", "10.0.0.1"))


@pytest.mark.parametrize(
    ("network", "inside", "outside"),
    [
        ("10.0.0.0/8", ["10.1.2.3", "::ffff:10.1.2.3"], ["11.0.0.1", "::ffff:11.0.0.1", "x", "10.1.2.3 "]),
        ("10.0.0.7", ["10.0.0.7"], ["10.0.0.8"]),
        ("2001:db8::/32", ["2001:db8::1", "2001:0db8:0::1"], ["2001:db9::1"]),
    ],
)
def test_a_network_is_trusted_in_every_form_of_its_addresses(
    network: str, inside: list[str], outside: list[str]
) -> None:
    proxies = TrustedProxies([network])
    assert all(proxies.trusted(address) for address in inside)
    assert not any(proxies.trusted(address) for address in outside)
