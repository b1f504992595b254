"""Real servers with certificates: who gets in, who may call what, and what becomes of attackers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import pkgutil
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from google.protobuf.descriptor import MethodDescriptor

import bottega.v1
from bottega.errors import ConfigError
from bottega.rpc.channel import PLAINTEXT, Channels, Target, open_channel
from bottega.rpc.security.caller import METHOD_ROLES, Role
from bottega.rpc.security.tls import TlsConfig
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from tests.support.certificates import Authority

CALLERS = (
    "tenant/shop",
    "tenant/other",
    "operator/anna",
    *(f"{role}/one" for role in Role if role.value not in ("local", "tenant", "operator")),
)
LIST = "/bottega.v1.WorkerService/ListAttempts"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/Check"


def _methods() -> Iterator[tuple[str, MethodDescriptor]]:
    """Every method of the contract, as gRPC names it."""
    for module in pkgutil.iter_modules(bottega.v1.__path__):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(f"bottega.v1.{module.name}").DESCRIPTOR
            for service in descriptor.services_by_name.values():
                for method in service.methods:
                    yield f"/{service.full_name}/{method.name}", method


METHODS = dict(_methods())


def test_the_table_has_every_method_of_the_contract_and_no_other() -> None:
    assert set(METHOD_ROLES) == set(METHODS)


class Everything(grpc.GenericRpcHandler):
    """Serves every method, and answers nothing."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any | None:
        method = METHODS.get(handler_call_details.method)
        if method is None:
            return None
        kinds = {(False, False): "unary_unary", (False, True): "unary_stream", (True, False): "stream_unary"}
        kind = kinds.get((method.client_streaming, method.server_streaming), "stream_stream")
        handler = _stream if method.server_streaming else _answer
        return getattr(grpc, f"{kind}_rpc_method_handler")(handler)


async def _answer(request: object, context: object) -> bytes:
    return b""


async def _stream(request: object, context: object) -> AsyncIterator[bytes]:
    for _ in range(1):
        yield b""


@contextlib.asynccontextmanager
async def serving(tls: TlsConfig, **config: object) -> AsyncIterator[Server]:
    server = Server("worker", ServerConfig(tls=tls, drain_grace_s=0.1, **config))  # type: ignore[arg-type]
    server.grpc.add_generic_rpc_handlers((Everything(),))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certs")


def _to(server: Server, *, role: Role = Role.WORKER, name: str = "") -> Target:
    return Target(address=server.address, role=role, name=name)


async def _outcome(channel: grpc.aio.Channel, name: str) -> str:
    """The name of the status with which a call of a method ends."""
    method = METHODS[name]
    calls: dict[tuple[bool, bool], Any] = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    # A stream sends nothing: asyncio's client says INTERNAL when it writes to a call that was refused meanwhile.
    requests = {} if method.client_streaming else {"request": b""}
    call = calls[method.client_streaming, method.server_streaming](name)(**requests, timeout=5)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if method.server_streaming:
            async for _ in call:
                pass
    return str((await call.code()).name)


async def test_exactly_the_table_is_allowed(authority: Authority) -> None:
    allowed: dict[str, set[str]] = {}
    async with serving(authority.issue("worker/w1")) as server:
        for caller in CALLERS:
            async with authority.channels(caller).open(_to(server)) as channel:
                outcomes = await asyncio.gather(*(_outcome(channel, name) for name in METHODS))
            for name, outcome in zip(METHODS, outcomes, strict=True):
                assert outcome in ("OK", "PERMISSION_DENIED"), (caller, name, outcome)
                if outcome == "OK":
                    allowed.setdefault(name, set()).add(caller.partition("/")[0])
        assert allowed == {name: set(roles) for name, roles in METHOD_ROLES.items()}


async def test_health_is_for_everybody_who_gets_in(authority: Authority) -> None:
    async with (
        serving(authority.issue("worker/w1")) as server,
        authority.channels("tenant/shop").open(_to(server)) as channel,
    ):
        check: Any = channel.unary_unary(HEALTH)
        assert await check(b"", timeout=5)


@pytest.mark.parametrize("reflection", [True, False])
async def test_what_methods_there_are_is_told_where_the_configuration_says_so(reflection: bool) -> None:
    async with serving(TlsConfig(), reflection=reflection) as server, open_channel(server.address) as channel:
        ask: Any = channel.stream_stream(REFLECTION)
        call = ask(iter([b""]), timeout=5)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert (await call.code() is grpc.StatusCode.UNIMPLEMENTED) is not reflection


async def _cannot_call(channels: Channels, target: Target) -> None:
    async with channels.open(target) as channel:
        assert await _outcome(channel, LIST) == "UNAVAILABLE"


async def test_who_has_no_good_certificate_does_not_get_in(authority: Authority, tmp_path: Path) -> None:
    foreign = Authority(tmp_path / "foreign")
    async with serving(authority.issue("worker/w1")) as server:
        await _cannot_call(PLAINTEXT, _to(server))
        await _cannot_call(foreign.channels("gateway/main"), _to(server))
        await _cannot_call(authority.channels("gateway/main", days=0), _to(server))
        async with authority.channels("gateway/main").open(_to(server)) as channel:
            assert await _outcome(channel, LIST) == "OK"


async def test_a_caller_believes_only_the_role_and_the_name_that_it_means(authority: Authority, tmp_path: Path) -> None:
    channels = authority.channels("gateway/main")
    async with serving(authority.issue("worker/w1")) as server:
        for target in (_to(server), _to(server, name="w1")):
            async with channels.open(target) as channel:
                assert await _outcome(channel, LIST) == "OK"
        await _cannot_call(channels, _to(server, name="w2"))
        await _cannot_call(channels, _to(server, role=Role.LORAS))
        await _cannot_call(channels, _to(server, role=Role.LORAS, name="w1"))
    async with serving(Authority(tmp_path / "foreign").issue("worker/w1")) as impostor:
        await _cannot_call(channels, _to(impostor, name="w1"))
    async with serving(TlsConfig()) as plain:
        await _cannot_call(channels, _to(plain, name="w1"))


def _with_names(authority: Authority, names: list[x509.GeneralName]) -> grpc.ChannelCredentials:
    """Return credentials with a certificate of the authority that has these alternative names."""
    folder = authority.folder
    issuer = x509.load_pem_x509_certificate(folder.authority_path.read_bytes())
    issuer_key = serialization.load_pem_private_key(folder.authority_key_path.read_bytes(), None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bottega://operator/me")]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    return grpc.ssl_channel_credentials(folder.authority_path.read_bytes(), secret, pem)


async def test_a_uri_of_a_certificate_names_its_owner_and_nothing_else_of_it_does(authority: Authority) -> None:
    """A DNS name, or an address of mail, may read like the URI of an operator."""
    uri = "bottega://operator/me"
    async with serving(authority.issue("worker/w1")) as server:
        cases: tuple[tuple[list[x509.GeneralName], str], ...] = (
            ([x509.UniformResourceIdentifier(uri)], "OK"),
            ([x509.DNSName(uri)], "UNAUTHENTICATED"),
            ([x509.RFC822Name(uri)], "UNAUTHENTICATED"),
            ([x509.DNSName(uri), x509.UniformResourceIdentifier("bottega://tenant/shop")], "PERMISSION_DENIED"),
        )
        for names, outcome in cases:
            options = [("grpc.ssl_target_name_override", "worker.bottega")]
            credentials = _with_names(authority, names)
            async with grpc.aio.secure_channel(server.address, credentials, options=options) as channel:
                assert await _outcome(channel, "/bottega.v1.TemplateService/ListTemplates") == outcome


async def test_certificates_are_renewed_under_load_without_a_failed_call(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.rpc.security.tls._LOOK_S", 0.0)
    outcomes: list[str] = []
    async with serving(authority.issue("worker/w1")) as server:
        channels = authority.channels("gateway/main")

        async def call() -> None:
            async with channels.open(_to(server, name="w1")) as channel:
                outcomes.extend([await _outcome(channel, LIST) for _ in range(5)])

        for _ in range(4):
            calling = asyncio.gather(*(call() for _ in range(10)))
            await asyncio.to_thread(authority.issue, "worker/w1")
            await asyncio.to_thread(authority.issue, "gateway/main")
            await calling
        metric = server.registry.get_sample_value("bottega_certificate_expires_timestamp_seconds")
        assert metric is not None
        assert metric > 0
    assert outcomes == ["OK"] * 200


@pytest.mark.parametrize("config", [{}, {"client_certificates": False}])
async def test_a_port_that_the_network_can_reach_needs_certificates_or_says_that_it_has_none(
    authority: Authority, caplog: pytest.LogCaptureFixture, config: dict[str, object]
) -> None:
    tls = authority.issue("worker/w1") if config else TlsConfig()
    with pytest.raises(ConfigError, match=r"server\.listen 0\.0\.0\.0:0 can be reached"):
        async with serving(tls, listen="0.0.0.0:0", **config):
            pass
    with caplog.at_level(logging.WARNING):
        async with serving(tls, listen="0.0.0.0:0", insecure=True, **config):
            pass
    assert "open to the network" in caplog.text
    async with serving(authority.issue("worker/w1"), listen="0.0.0.0:0"):
        pass
    with pytest.raises(ConfigError, match="metrics are not encrypted"):
        async with serving(authority.issue("worker/w1"), metrics_listen="0.0.0.0:0"):
            pass
