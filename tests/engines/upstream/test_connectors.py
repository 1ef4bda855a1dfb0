"""Connectors: the parameters of both legs of a request, and the time in which the second one makes sense."""

import json
from math import inf
from typing import Any

import anyio
import pytest

from engines.upstream import CONNECTORS, KvConnector, MooncakePush, NixlPull, PrefillServer, kv_connector
from pipeline import InvalidArgument, WorkerOverloaded
from pipeline.errors import InvalidMessage, may_migrate

ANSWERED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[11, 12]],
    "remote_engine_id": "e-1",
    "remote_request_id": "generate-tokens-7",
    "remote_host": "10.0.0.1",
    "remote_port": 18301,
    "tp_size": 1,
    "remote_num_tokens": 300,
    "transfer_mode": "pull",
    "a key of a later version": {"kept": [1, 2]},
}
"""What vLLM's prefill server answers with."""

SERVER = PrefillServer.parse("http://10.0.0.1:8998/", {"0": {"engine_id": "e-0"}, "3": {"engine_id": "e-3"}})


def offer(connector: KvConnector, transfer_id: str = "t-1", dp_rank: int = 0) -> Any:
    """Return an offer as decode gets it: across a process."""
    offered = connector.offer(transfer_id, dict(ANSWERED), server=SERVER, dp_rank=dp_rank)
    return json.loads(json.dumps(offered))


# -- parameters


async def test_nixl_hands_on_every_key_of_prefills_answer_unchanged() -> None:
    nixl = kv_connector("nixl")
    assert nixl.prefill_params("t-1") == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert nixl.take(offer(nixl)).params == ANSWERED


async def test_mooncake_names_the_transfer_on_both_sides_and_where_prefill_is() -> None:
    mooncake = kv_connector("mooncake")
    transfer_id = mooncake.transfer_id()
    assert mooncake.prefill_params(transfer_id) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
    }
    assert mooncake.take(offer(mooncake, transfer_id, dp_rank=3)).params == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "e-3",
    }


async def test_lmcache_has_neither_parameters_nor_a_lease() -> None:
    lmcache = kv_connector("lmcache")
    assert lmcache.prefill_params("t-1") is None
    offered = lmcache.offer("t-1", None)
    await anyio.sleep(3600)
    taken = lmcache.take(offered)
    assert taken.params is None
    lmcache.renew(taken)
    lmcache.done(taken)


async def test_two_transfers_have_different_ids() -> None:
    nixl = NixlPull()
    assert nixl.transfer_id() != nixl.transfer_id()


async def test_decode_gets_a_copy_so_that_a_retry_finds_the_offer_unchanged() -> None:
    nixl = kv_connector("nixl")
    offered = nixl.offer("t-1", ANSWERED)
    taken = nixl.take(offered)
    assert taken.params is not None
    taken.params.clear()
    assert nixl.take(offered).params == ANSWERED


@pytest.mark.parametrize("answered", [None, {}, [], "none", {"do_remote_prefill": False}])
async def test_a_prefill_server_that_offers_no_blocks_is_an_error_that_names_its_option(answered: Any) -> None:
    nixl = NixlPull()
    with pytest.raises(InvalidMessage, match="--kv-transfer-config"):
        nixl.offer("t-1", answered)
    assert len(nixl.leases) == 0


@pytest.mark.parametrize("server", [None, PrefillServer("http://p:8998", {1: "e-1"})])
async def test_mooncake_offers_nothing_of_a_rank_it_does_not_know(server: PrefillServer | None) -> None:
    with pytest.raises(InvalidMessage, match="no engine of rank 0"):
        MooncakePush().offer("t-1", None, server=server)


@pytest.mark.parametrize("answer", [{}, [], None, {"0": {}}, {"0": None}, {"zero": {"engine_id": "e"}}])
def test_a_bootstrap_server_without_an_engine_is_refused(answer: Any) -> None:
    with pytest.raises(InvalidMessage, match="http://p:8998/query"):
        PrefillServer.parse("http://p:8998", answer)


@pytest.mark.parametrize("offered", [None, [], {}, "text", {"kv_transfer_params": 3}, {"kv_transfer_params": [1]}])
async def test_what_is_no_offer_is_refused_by_the_name_of_its_field(offered: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        NixlPull().take(offered)
    assert refused.value.field == "prefill_result.disaggregated_params"


@pytest.mark.parametrize(
    ("name", "found"),
    [*((name, name) for name in CONNECTORS), ("NixlConnector", "nixl"), ("LMCacheMPConnector", "lmcache")],
)
def test_a_connector_is_found_by_its_name_here_and_by_that_of_vllm(name: str, found: str) -> None:
    assert kv_connector(name).name == found


def test_an_unknown_connector_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="nixl, mooncake, lmcache"):
        kv_connector("P2pNcclConnector")


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan")])
def test_a_lease_lasts_longer_than_nothing(lease_s: float) -> None:
    with pytest.raises(InvalidArgument, match="above 0"):
        NixlPull(lease_s)


# -- leases


@pytest.mark.parametrize(("after_s", "is_over"), [(0.0, False), (24.9, False), (25.0, True), (3600.0, True)])
async def test_an_offer_can_be_taken_until_a_sixth_before_its_lease_ends(after_s: float, is_over: bool) -> None:
    nixl = NixlPull(30.0)
    offered = offer(nixl)
    await anyio.sleep(after_s)
    assert len(nixl.leases) == (0 if is_over else 1)
    if not is_over:
        nixl.take(offered)
        return
    with pytest.raises(WorkerOverloaded) as refused:
        nixl.take(offered)
    assert may_migrate(refused.value)


async def test_a_lease_that_is_over_stays_over_when_others_have_begun_since() -> None:
    nixl = NixlPull(30.0)
    late = offer(nixl, "late")
    await anyio.sleep(26)
    offers = [offer(nixl, f"t-{n}") for n in range(10)]
    with pytest.raises(WorkerOverloaded):
        nixl.take(late)
    assert len(nixl.leases) == 10
    for offered in offers:
        nixl.done(nixl.take(offered))
    assert len(nixl.leases) == 0


async def test_a_lease_that_is_done_cannot_be_taken_again() -> None:
    nixl = NixlPull()
    offered = offer(nixl)
    taken = nixl.take(offered)
    nixl.done(taken)
    nixl.done(taken)
    with pytest.raises(WorkerOverloaded):
        nixl.take(offered)


async def test_once_decodes_server_has_the_request_a_lease_of_nixl_is_renewed_there() -> None:
    nixl = NixlPull(30.0)
    taken = nixl.take(offer(nixl))
    await anyio.sleep(20)
    nixl.renew(taken)
    assert taken.lease.ends_s == inf
    assert len(nixl.leases) == 0


async def test_nothing_renews_a_lease_of_mooncake() -> None:
    mooncake = MooncakePush(60.0)
    taken = mooncake.take(offer(mooncake))
    await anyio.sleep(49)
    mooncake.renew(taken)
    assert not taken.lease.is_over
    await anyio.sleep(1)
    assert taken.lease.is_over


async def test_a_request_that_reaches_its_server_after_the_lease_is_given_up() -> None:
    nixl = NixlPull(30.0)
    taken = nixl.take(offer(nixl))
    await anyio.sleep(25)
    with pytest.raises(WorkerOverloaded):
        nixl.renew(taken)


async def test_the_lease_of_another_process_begins_when_it_is_taken_and_lasts_as_long_as_it_has_written() -> None:
    offered = offer(NixlPull(60.0))
    await anyio.sleep(1000)
    taken = NixlPull(30.0).take(offered)
    await anyio.sleep(49)
    assert not taken.lease.is_over
    await anyio.sleep(1)
    assert taken.lease.is_over


@pytest.mark.parametrize(
    "lease", [None, [], {}, {"id": 3}, {"id": "x", "duration_s": -1}, {"id": "x", "duration_s": float("nan")}]
)
async def test_an_offer_without_a_lease_that_can_be_read_has_one_of_the_usual_length(lease: Any) -> None:
    nixl = NixlPull(30.0)
    taken = nixl.take({"kv_transfer_params": ANSWERED, "lease": lease})
    assert taken.lease.ends_s - anyio.current_time() == pytest.approx(25)


async def test_two_transfers_cannot_have_one_id() -> None:
    nixl = NixlPull()
    offer(nixl)
    with pytest.raises(InvalidArgument, match="has begun already"):
        offer(nixl)
