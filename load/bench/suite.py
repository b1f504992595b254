"""The suite as real processes for a bench: one gateway and one worker of one model, on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from bottega.client import Client
from bottega.client.transport import credentials
from bottega.rpc.security.caller import Identity, Role
from bottega.rpc.security.certificates import CertificateFolder
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

JOIN_TIMEOUT_S = 10.0


@contextmanager
def running(model: str, threads: int, folder: Path, *, tls: bool = False) -> Iterator[str]:
    """The address of a gateway whose worker serves `model` ("miniature" or a folder) and has joined.

    tls: they know each other by certificates, and so do clients that are made in the block.
    """
    with running_gateway(model, threads, folder, tls=tls) as gateway:
        yield gateway.address


@contextmanager
def running_gateway(
    model: str, threads: int, folder: Path, *, tls: bool = False, **gateway_overrides: object
) -> Iterator[Service]:
    """That gateway. tls: see `running`. gateway_overrides: of its configuration."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        files = stack.enter_context(_certificates(folder / "certs")) if tls else {}
        services = stack.enter_context(Services(folder))
        gateway = services.start("gateway", gateway_config(server=_server(files.get("gateway")), **gateway_overrides))
        engine = {"model": model, "threads": threads}
        worker = worker_config(gateway.fleet, name="worker", engine=engine)
        services.start("worker", {**worker, "server": _server(files.get("worker"))})
        with Client(gateway.address) as client:
            wait_until(lambda: bool(client.models()), "the worker to join", within_s=JOIN_TIMEOUT_S)
        yield gateway


@contextmanager
def _certificates(folder: Path) -> Iterator[Mapping[str, Mapping[str, str]]]:
    """The files of a gateway and a worker, by kind. In the block clients are an operator."""
    made = CertificateFolder(folder)
    made.make_authority(days=1)
    files = {}
    for role, name in ((Role.GATEWAY, "gateway"), (Role.WORKER, "worker"), (Role.OPERATOR, "bench")):
        paths = made.issue(Identity(role=role, name=name), days=1)
        files[str(role)] = {
            "authority": str(made.authority_path),
            "certificate": str(paths.certificate),
            "key": str(paths.key),
        }
    own = files[str(Role.OPERATOR)]
    known = (own["authority"], own["certificate"], own["key"])
    with mock.patch.dict(os.environ, dict(zip(credentials.VARIABLES, known, strict=True))):
        yield files


def _server(tls: Mapping[str, str] | None) -> Mapping[str, object]:
    return {**FREE_PORTS, "tls": dict(tls)} if tls else FREE_PORTS
