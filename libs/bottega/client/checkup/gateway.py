"""Checks a gateway, its certificates and its fleet; if no gateway answers, the processes that use its ports."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bottega import kinds
from bottega.client.addons.addon import CheckResult, Level, add_ons_by_kind, fail, ok, refusals_of, warn
from bottega.client.sdk.clients import AsyncClient
from bottega.client.transport.calls import RetryPolicy
from bottega.client.transport.credentials import Tls, channels_of, tls_from_environment
from bottega.client.types.fleet import FleetMember, FleetStatus
from bottega.errors import BottegaError, ConfigError
from bottega.manifest import read_services
from bottega.plain_text import progress_text
from bottega.rpc.address import is_loopback, resolve_list, split, split_list
from bottega.rpc.channel import Target
from bottega.rpc.security.caller import Role, dns_name
from bottega.rpc.security.tls import find_tls_mismatch

_ANSWER_S = 2.0
_GATEWAY_LOG = "bottega logs gateway says more, on a server journalctl -u bottega-gateway -n 50 -o cat."
_LOCAL = ("127.0.0.1", "localhost", "[::1]")


def check_gateway(address: str, fleet_address: str) -> Iterator[CheckResult]:
    """Check the gateway at `address`, and the fleet that it lists at `fleet_address`. Both are host:port.

    With several gateways each is a list (rpc.address), or a name that resolves to all of them.
    """
    gateways = asyncio.run(resolve_list(split_list(address)))
    serving = False
    for gateway in gateways:
        results = list(_check_one(gateway, alone=len(gateways) == 1))
        serving = serving or results[0].level is Level.OK
        yield from results
    if serving:
        yield from _check_fleet(fleet_address)


def _check_one(address: str, *, alone: bool) -> Iterator[CheckResult]:
    """Check whether a gateway serves, and then its certificate. `alone` says whether it is the only gateway."""
    try:
        status = _health(address)
    except grpc.RpcError:
        encrypted = channels_of(tls_from_environment()).encrypted
        if mismatch := asyncio.run(find_tls_mismatch(address, encrypted=encrypted)):
            todo = "Unset BOTTEGA_TLS_AUTHORITY." if encrypted else "Set BOTTEGA_TLS_AUTHORITY to its authority's file."
            yield fail(mismatch, todo)
        elif alone:
            yield from _check_ports(address)
        else:
            yield fail(f"no gateway answers at {address}", "Is it running? The other gateways serve without it.")
        return
    if status != health_pb2.HealthCheckResponse.SERVING:
        known = health_pb2.HealthCheckResponse.ServingStatus.values()
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(status) if status in known else f"status {status}"
        yield fail(
            f"the gateway at {address} reports {name}", f"It starts or stops, or its disk is full; {_GATEWAY_LOG}"
        )
        return
    yield ok(f"the gateway at {address} serves")
    yield from check_certificates(address)


def _health(address: str) -> int:
    target = Target(address=address, role=Role.GATEWAY)
    with channels_of(tls_from_environment()).open_blocking(target) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # missing in its types
        answer = check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
    return int(answer.status)


def _check_fleet(fleet_address: str) -> Iterator[CheckResult]:
    try:
        fleet = asyncio.run(_fleet(fleet_address))
    except BottegaError as error:
        at_fault = error.metadata.get("listener") == "fleet"
        todo = (
            "Is that the gateway's fleet.listen (--fleet-address, BOTTEGA_FLEET)? By default only its machine"
            " reaches it."
        )
        yield fail(
            f"the gateway does not list its fleet: {error.message}",
            todo if at_fault else _GATEWAY_LOG,
        )
        return
    for silent in fleet.silent:
        yield fail(f"the gateway does not list its fleet at {silent}", "Is that its fleet.listen, and does it run?")
    if fleet.scheduler:
        yield ok(f"{len(fleet.of_kind(kinds.GATEWAY))} gateways, of which {fleet.scheduler} schedules")
    workers = fleet.of_kind(kinds.WORKER)
    ready = [worker for worker in workers if worker.models]
    models = sorted({model.name for worker in ready for model in worker.models})
    for worker in workers:
        if start := worker.starting:
            text = progress_text(start.stage, start.done_bytes, start.total_bytes)
            yield warn(f"{worker.name} starts: {text}", "Requests for its model wait until it is ready.")
    if ready:
        yield ok(f"{len(ready)} worker{'' if len(ready) == 1 else 's'} joined, for {', '.join(models)}")
    elif not workers:
        yield fail(
            "no worker has joined",
            "A worker takes seconds to load its model, a large one minutes; bottega logs worker-0 says more, on a"
            " server journalctl -u 'bottega-worker@*' -n 50 -o cat.",
        )
    yield from _check_accelerations(workers)
    yield from _check_services(fleet)
    yield from _check_left_out(fleet)
    versions = sorted({member.version for member in fleet.members} - {""})
    if len(versions) > 1:
        yield warn(f"the fleet runs versions {', '.join(versions)}", "Bring every service to one version.")


def _check_accelerations(workers: Iterable[FleetMember]) -> Iterator[CheckResult]:
    """Yield, for each worker that tested accelerations at its start, which of them it uses."""
    for worker in workers:
        tried = worker.load.accelerations
        if not tried:
            continue
        kept = [f"{trial.name} ({trial.speedup:.2f} x)" for trial in tried if trial.kept]
        name = f"{worker.name} on {worker.device}"
        if kept:
            yield ok(f"{name} uses {', '.join(kept)}; {len(tried) - len(kept)} more are off")
        else:
            yield warn(f"{name} uses none of {len(tried)} tested accelerations", "bottega fleet -v says why.")


def _check_services(fleet: FleetStatus) -> Iterator[CheckResult]:
    """Yield findings about all services except workers: those of an add-on's check, else how many have joined."""
    counts = Counter(member.kind for member in fleet.members)
    add_ons = add_ons_by_kind()
    titles = _titles() | {kind: add_on.title for kind, add_on in add_ons.items()}
    for kind in sorted((counts.keys() | add_ons.keys()) - {kinds.GATEWAY, kinds.WORKER}):
        add_on, count = add_ons.get(kind), counts[kind]
        if add_on is not None and add_on.check_fleet is not None:
            yield from add_on.check_fleet(fleet)
        elif count:
            yield ok(f"{count} {titles.get(kind, kind)}{'' if count == 1 else 's'} joined")


def _check_left_out(fleet: FleetStatus) -> Iterator[CheckResult]:
    """Warn of files that services found but do not host, and of workers that cannot serve their model."""
    for member in fleet.members:
        for item in member.load.left_out:
            todo = "Correct or remove the file or folder, and restart the service."
            yield warn(f"{member.name} does not serve {item.name}: {item.reason}", todo)
    for member, reason in refusals_of(fleet):
        todo = "Correct the model's folder, or engine.model in the worker's configuration, and restart the worker."
        yield fail(f"the worker {member.name} has ended: {reason}", todo)


def _titles() -> dict[str, str]:
    """Return what services are called, by kind; empty if the manifest cannot be read, as without bottega-services."""
    try:
        return {service.kind: service.title for service in read_services()}
    except ConfigError:
        return {}


async def _fleet(fleet_address: str) -> FleetStatus:
    no_patience = RetryPolicy(patience_s=0.0)
    async with AsyncClient(fleet_address=fleet_address, timeout_s=_ANSWER_S, retry=no_patience) as client:
        return await client.fleet()


def _check_ports(address: str) -> Iterator[CheckResult]:
    host, _, port = address.rpartition(":")
    if host not in _LOCAL or not port.isdigit():
        yield fail(
            f"no gateway answers at {address}", "Is it running, and is the address right? (--address, BOTTEGA_ADDRESS)"
        )
        return
    own, metrics, fleet, http = (int(port) + offset for offset in range(4))  # as in plan_suite
    owners = {own: "the gateway", metrics: "the gateway's metrics", fleet: "the gateway's fleet", http: "HTTP"}
    taken = [result for port, whose in owners.items() for result in _check_free(port, whose)]
    yield from taken
    if not taken:
        yield warn(
            f"no gateway runs; its ports {own} to {http} are free",
            "Start one with: bottega up; on a server with its units: systemctl start bottega-gateway",
        )


def _check_free(port: int, whose: str) -> Iterator[CheckResult]:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return
    except (OSError, OverflowError):  # OverflowError: beyond the last port
        yield fail(
            f"port {port}, for {whose}, is taken by {_listener(port)}, which is no gateway",
            "End it, or: bottega up --port PORT",
        )


def _listener(port: int) -> str:
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another program"


_DAY_S = 86_400.0
_SOON_DAYS = 14
_RENEW = "bottega certs renew makes a new one; services use it within a second."


def check_certificates(address: str) -> Iterator[CheckResult]:
    """Check the certificates of the gateway at `address` and of this client."""
    tls = tls_from_environment()
    if tls is None:
        if not is_loopback(address):
            yield warn(
                f"calls to {address} are not encrypted, and any server there is trusted",
                "bottega certs makes certificates; set BOTTEGA_TLS_AUTHORITY and the other variables to their files.",
            )
        return
    try:
        yield _validity("the gateway's certificate", _shown_at(address, tls))
        if tls.certificate is not None:
            yield _validity("this client's certificate", Path(tls.certificate).read_bytes())
    except (OSError, ssl.SSLError, BottegaError) as error:
        todo = "Did the same authority sign both? bottega certs show lists what an authority has signed."
        yield fail(f"the certificates cannot be checked: {error}", todo)


def _shown_at(address: str, tls: Tls) -> bytes:
    """Return the certificate that the gateway presents, in PEM. Raise SSLError if the authority has not signed it."""
    context = ssl.create_default_context(cafile=str(tls.authority))
    context.set_alpn_protocols(["h2"])
    if tls.certificate is not None and tls.key is not None:
        context.load_cert_chain(str(tls.certificate), str(tls.key))
    with (
        socket.create_connection(split(address), timeout=_ANSWER_S) as connection,
        context.wrap_socket(connection, server_hostname=dns_name(Role.GATEWAY)) as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
    assert shown is not None, "the context requires one"
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _validity(what: str, certificate: bytes) -> CheckResult:
    from bottega.rpc.security.certificates import facts_of

    facts = facts_of(certificate, source=what)
    days = (facts.expires_wall - time.time()) / _DAY_S
    named = f"{what}, for {facts.identity}," if facts.identity else what
    if days < 0:
        return fail(f"{named} has expired", _RENEW)
    expiry = f"{named} expires in {days:.0f} days"
    return warn(expiry, _RENEW) if days < _SOON_DAYS else ok(expiry)
