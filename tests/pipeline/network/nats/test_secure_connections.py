"""TLS, and users with credentials of their own, against a real server."""

from __future__ import annotations

import base64
import json
import os
import ssl
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import trustme

from pipeline import CannotConnect
from pipeline.network.nats import NatsConnection, NatsOptions
from pipeline.rx import AnyIOScheduler
from tests.pipeline.network.nats.worlds import ConfiguredServer

nkeys: Any = import_module("nkeys")
"""It has no types."""


async def connected(url: str, options: NatsOptions) -> None:
    """Connect and close. Raise what opening raises."""
    async with AnyIOScheduler() as scheduler:
        connection = NatsConnection(url, scheduler, options)
        await connection.open()
        await connection.close()


async def test_tls_is_spoken_with_servers_whose_certificate_holds(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    tls = {"cert_file": str(tmp_path / "cert.pem"), "key_file": str(tmp_path / "key.pem")}
    async with ConfiguredServer(tmp_path / "server", more={"tls": tls}) as server:
        trusting, distrustful = ssl.create_default_context(), ssl.create_default_context()
        authority.configure_trust(trusting)
        other.configure_trust(distrustful)
        await connected(server.url, NatsOptions(tls=trusting))
        await connected(server.url.replace("nats:", "tls:"), NatsOptions(tls=trusting))
        for options in (NatsOptions(tls=distrustful), NatsOptions()):
            with pytest.raises(CannotConnect, match="certificate"):
                await connected(server.url, options)


# -- credentials


def new_key(prefix: int) -> Any:
    return nkeys.from_seed(bytearray(nkeys.encode_seed(os.urandom(32), prefix)))


def signed(issuer: Any, subject: Any, claims: dict[str, Any]) -> str:
    """Return a JWT as NATS has them."""
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    body = {"jti": "1", "iat": 1, "iss": issuer.public_key.decode(), "name": "n", "sub": subject.public_key.decode()}
    text = ".".join(_encoded(json.dumps(part).encode()) for part in (head, body | {"nats": claims | {"version": 2}}))
    return f"{text}.{_encoded(issuer.sign(text.encode()))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


async def test_a_user_with_credentials_is_let_in_and_another_is_not(tmp_path: Path) -> None:
    operator, account, system = new_key(nkeys.PREFIX_BYTE_OPERATOR), *(new_key(nkeys.PREFIX_BYTE_ACCOUNT) for _ in "12")
    all_of_it = dict.fromkeys(
        ("subs", "conn", "leaf", "imports", "exports", "data", "payload", "mem_storage", "disk_storage", "streams"), -1
    )
    limits = {"limits": all_of_it | {"consumer": -1, "wildcards": True}, "type": "account"}
    accounts = {
        one.public_key.decode(): signed(operator, one, limits if one is account else {"type": "account"})
        for one in (account, system)
    }
    more = {
        "operator": signed(operator, operator, {"type": "operator"}),
        "resolver": "MEMORY",
        "resolver_preload": accounts,
        "system_account": system.public_key.decode(),
    }
    async with ConfiguredServer(tmp_path / "server", more=more) as server:
        for issuer, is_known in ((account, True), (new_key(nkeys.PREFIX_BYTE_ACCOUNT), False)):
            user = new_key(nkeys.PREFIX_BYTE_USER)
            path = tmp_path / f"{is_known}.creds"
            path.write_text(
                "-----BEGIN NATS USER JWT-----\n"
                f"{signed(issuer, user, {'type': 'user', 'subs': -1, 'data': -1, 'payload': -1})}\n"
                "------END NATS USER JWT------\n\n"
                f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
            )
            options = NatsOptions(credentials_file=path)
            if is_known:
                await connected(server.url, options)
            else:
                with pytest.raises(CannotConnect, match="refuses the login"):
                    await connected(server.url, options)
        with pytest.raises(CannotConnect, match="No such file"):
            await connected(server.url, NatsOptions(credentials_file=tmp_path / "none", connect_timeout_s=0.5))
