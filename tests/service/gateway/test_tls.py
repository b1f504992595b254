"""A gateway and its fleet with certificates, as callers and members that are none meet it."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import pytest

from bottega import errors, kinds
from bottega.client import AsyncClient, Tls
from bottega.client.addons.addon import Level
from bottega.client.checkup.gateway import check_gateway
from bottega.client.transport import credentials
from bottega.rpc import gateway_membership
from bottega.rpc.channel import PLAINTEXT, Channels, Target
from bottega.rpc.fleet_membership import FleetMembership
from bottega.rpc.security.api_keys import new_key
from bottega.rpc.security.caller import Role
from bottega.rpc.security.tenant_file import Tenant, change_tenants
from bottega.rpc.security.tls import AuthorityFile, TlsConfig
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.certificates import Authority
from tests.support.running_gateway import refusal, running_gateway
from tests.support.terminal import run_at
from tests.support.waiting import eventually


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certs")


async def test_pictures_are_drawn_over_mutual_tls(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    config = authority.issue("gateway/main")
    async with running_gateway(tls=config, channels=authority.channels("operator/anna")) as house:
        await house.worker("w1", tls=authority.issue("worker/w1"))
        done = await house.draw(prompt="a star")
        assert len(done.images) == 1
        shop = authority.issue("tenant/shop")
        tls = _tls(shop)
        async with AsyncClient(house.address, tls=tls) as client:
            picture = await client.generate("a star", num_inference_steps=20)
            assert picture.data == b"picture 0"
            assert [status.parameters.prompt for status in (await client.list_jobs()).jobs] == ["a star"]
        for name, value in zip(credentials.VARIABLES, (shop.authority, shop.certificate, shop.key), strict=True):
            monkeypatch.setenv(name, value)
        async with AsyncClient(house.address, fleet_address=house.fleet_address) as client:
            assert [model.name for model in await client.models()] == ["miniature"]
            with pytest.raises(errors.Forbidden, match="tenant shop may not"):
                await client.fleet()
        anna = authority.issue("operator/anna")
        async with AsyncClient(house.address, fleet_address=house.fleet_address, tls=_tls(anna)) as client:
            assert [member.name for member in (await client.fleet()).members] == ["gateway", "w1"]


def _tls(files: TlsConfig) -> Tls:
    """The same certificate for a client."""
    return Tls(authority=files.authority, certificate=files.certificate, key=files.key)


def is_refused(membership: FleetMembership) -> bool:
    return all(member._refusal is not None for member in membership._members.values())


async def test_a_member_joins_under_the_name_of_its_certificate_alone(authority: Authority) -> None:
    async with running_gateway(
        tls=authority.issue("gateway/main"), channels=authority.channels("operator/anna")
    ) as house:
        await house.worker("w1", tls=authority.issue("worker/w1"))
        for kind, name, shown in (
            (kinds.WORKER, "w1", "worker/w2"),
            (kinds.WORKER, "w2", "cache/w2"),
            (kinds.LORAS, "w2", "worker/w2"),
            *((kinds.WORKER, "w9", impostor) for impostor in ("tenant/shop", "operator/anna", "gateway/main")),
        ):
            registration = fleet_pb2.Registration(kind=kind, name=name, address="127.0.0.1:1", instance="i" * 32)
            member = FleetMembership(
                house.fleet_address, registration, load=fleet_pb2.Load, channels=authority.channels(shown)
            )
            member.start()
            await eventually(functools.partial(is_refused, member), "the gateway to refuse it")
            assert not member.joined.is_set()
            await member.stop()
        listed = await house.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=60)
        assert [member.registration.name for member in listed.members] == ["gateway", "w1"]


async def test_an_address_is_dialled_only_where_the_certificate_has_the_name_that_joined(authority: Authority) -> None:
    """Its own certificate is good, and the address that it names is another worker's."""
    async with running_gateway(
        tls=authority.issue("gateway/main"), channels=authority.channels("operator/anna"), max_attempts=1
    ) as house:
        victim = ScriptedWorker("victim", house.fleet_address, tls=authority.issue("worker/victim"))
        await victim.listen()
        liar = ScriptedWorker("liar", house.fleet_address, tls=authority.issue("worker/liar"))
        await liar.listen()
        await liar.join(victim.address)
        call = house.images.SubmitJob(image_pb2.SubmitJobRequest(spec=GenerationSpec(prompt="a star")), timeout=60)
        job = (await call).job
        await asyncio.sleep(1.0)
        assert victim.requests == [], "nothing of the job has reached it"
        assert (await house.job(job.job_id)).state != image_pb2.JOB_STATE_COMPLETED
        await liar.die()
        await victim.die()


async def test_keys_go_over_tls_where_the_gateway_asks_for_no_certificates(
    authority: Authority, tmp_path: Path
) -> None:
    key, parts = new_key()
    file = tmp_path / "tenants.json"
    change_tenants(file, lambda _: (Tenant(name="shop").rotated(parts, keep_old=False),))
    config = authority.issue("gateway/main")
    async with running_gateway(tls=config, client_certificates=False, tenants=str(file)) as house:
        await house.worker("w1", tls=authority.issue("worker/w1"))
        async with AsyncClient(house.address, api_key=key, tls=Tls(authority=config.authority)) as client:
            assert (await client.generate("a star", num_inference_steps=20)).data == b"picture 0"
            assert await client.adapters() == ()
            with pytest.raises(errors.Forbidden, match="needs an operator's certificate"):
                await client.controlnets()
        async with AsyncClient(house.address, api_key="", tls=Tls(authority=config.authority)) as client:
            with pytest.raises(errors.Unauthenticated):
                await client.models()
        async with Channels(AuthorityFile(Path(config.authority))).open(
            Target(address=house.address, role=Role.GATEWAY), api_key=key
        ) as channel:
            fleet: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
            refused = await refusal(
                lambda: fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=60), errors.Forbidden
            )
            assert "needs an operator's certificate" in refused.message
        # In plain text nothing is said to it, the key least of all.
        plain = await refusal(lambda: house.images.ListModels(image_pb2.ListModelsRequest(), timeout=60))
        assert isinstance(plain, errors.Unavailable)


async def test_a_certificate_is_a_tenants_only_where_the_gateway_knows_it(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    change_tenants(file, lambda _: (Tenant(name="shop"), Tenant(name="closed", disabled=True)))
    async with running_gateway(tls=authority.issue("gateway/main"), tenants=str(file)) as house:
        await house.worker("w1", tls=authority.issue("worker/w1"))
        for name, known in (("shop", True), ("closed", False), ("stranger", False)):
            files = authority.issue(f"tenant/{name}")
            tls = _tls(files)
            async with AsyncClient(house.address, fleet_address=house.fleet_address, tls=tls) as client:
                if known:
                    assert await client.models()
                    with pytest.raises(errors.Forbidden, match="needs an operator's certificate"):
                        await client.fleet()
                    continue
                with pytest.raises(errors.Unauthenticated, match="tenant is unknown to this gateway"):
                    await client.models()


@pytest.mark.parametrize("missing", ["authority", "key"])
async def test_what_a_client_lacks_is_said_by_its_name(authority: Authority, tmp_path: Path, missing: str) -> None:
    files = authority.issue("tenant/shop")
    given = {"authority": files.authority, "certificate": files.certificate, "key": files.key}
    given[missing] = str(tmp_path / "nowhere.pem")
    with pytest.raises(errors.InvalidRequest, match=r"^tls: .*nowhere\.pem is not there"):
        AsyncClient("127.0.0.1:1", tls=Tls(**given))


async def test_doctor_says_for_how_long_certificates_are_good(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(tls=authority.issue("gateway/main", days=40)) as house:
        anna = authority.issue("operator/anna", days=5)
        for name, value in zip(credentials.VARIABLES, (anna.authority, anna.certificate, anna.key), strict=True):
            monkeypatch.setenv(name, value)
        found = await asyncio.to_thread(lambda: list(check_gateway(house.address, house.fleet_address)))
        said = [(check.level, check.what) for check in found][:3]
        assert said == [
            (Level.OK, f"the gateway at {house.address} serves"),
            (Level.OK, "the gateway's certificate, for gateway/main, expires in 40 days"),
            (Level.WARN, "this client's certificate, for operator/anna, expires in 5 days"),
        ]


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain-text-to-tls", "tls-to-plain-text"])
async def test_ends_that_do_not_agree_on_tls_are_told_so_at_once(
    authority: Authority, encrypted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the SDK, the command, doctor, and a service that would join."""
    monkeypatch.setattr(gateway_membership, "_SILENCE_S", 0.0)
    shown = authority.issue("operator/anna")
    operator = authority.channels("operator/anna")
    server = TlsConfig() if encrypted else authority.issue("gateway/main")
    async with running_gateway(tls=server, channels=PLAINTEXT if encrypted else operator) as house:
        said = f"the server at {house.address} " + ("does not use TLS" if encrypted else "expects TLS")
        tls = _tls(shown) if encrypted else None
        async with AsyncClient(house.address, tls=tls) as client:
            for call in (client.models(), client.generate("a star")):
                with pytest.raises(errors.Unavailable, match=said):
                    await call
        if encrypted:
            monkeypatch.setenv(credentials.VARIABLES[0], shown.authority)
        done = await run_at(house, "models")
        assert (done.exit_code, said in " ".join(done.output.split())) == (1, True), done.output
        (found,) = await asyncio.to_thread(lambda: list(check_gateway(house.address, house.fleet_address)))
        assert (found.level, said in found.what) == (Level.FAIL, True)
        member = FleetMembership(
            house.fleet_address,
            fleet_pb2.Registration(kind=kinds.WORKER, name="w1", address="127.0.0.1:1", instance="i" * 32),
            load=fleet_pb2.Load,
            channels=operator if encrypted else PLAINTEXT,
        )
        member.start()
        of_fleet = said.replace(house.address, house.fleet_address)
        await eventually(lambda: any(of_fleet in getattr(item, "todo", "") for item in caplog.records), "the log")
        await member.stop()


async def test_a_certificate_of_another_authority_is_named(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other").issue("operator/anna")
    async with running_gateway(
        tls=authority.issue("gateway/main"), channels=authority.channels("operator/anna")
    ) as house:
        tls = _tls(other)
        async with AsyncClient(house.address, tls=tls) as client:
            with pytest.raises(errors.Unavailable, match="BOTTEGA_TLS_AUTHORITY has not signed"):
                await client.models()
