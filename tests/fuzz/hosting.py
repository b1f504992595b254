"""A ControlNet server that has joined the fuzzed gateway and runs nothing: so that ControlNets can be asked for.

Speaks the contract with a thread of its own.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from bottega import kinds
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, hosted_pb2
from bottega.v1.hosted_pb2 import Hosted

LONGEST_NAME = "x" * 200
HOSTED = ("edges", LONGEST_NAME)
"""Names that it hosts, for whatever base model."""

_REPORT_S = 0.5
_JOIN_S = 10.0
_INSTANCE = secrets.token_hex(16)


@contextmanager
def hosting(fleet: grpc.Channel) -> Iterator[None]:
    """It is in the fleet, and its first report was heard."""
    stopping = threading.Event()

    def said() -> Iterator[fleet_pb2.JoinRequest]:
        registration = fleet_pb2.Registration(
            kind=kinds.CONTROLNET, name="nets", address="127.0.0.1:1", instance=_INSTANCE
        )
        yield fleet_pb2.JoinRequest(registration=registration)
        yield fleet_pb2.JoinRequest(load=_load())
        while not stopping.wait(_REPORT_S):
            yield fleet_pb2.JoinRequest(load=_load())

    joining = threading.Thread(target=_stay, args=(fleet, said, stopping), daemon=True)
    joining.start()
    try:
        yield
    finally:
        stopping.set()
        joining.join(_JOIN_S)


def _stay(fleet: grpc.Channel, said: Callable[[], Iterator[fleet_pb2.JoinRequest]], stopping: threading.Event) -> None:
    """Joins, and joins again when a busy machine has let its lease pass."""
    while not stopping.is_set():
        try:
            for _ in fleet_pb2_grpc.FleetServiceStub(fleet).Join(said()):
                pass
        except grpc.RpcError:
            stopping.wait(_REPORT_S)


def _load() -> fleet_pb2.Load:
    state = hosted_pb2.HOSTED_STATE_LOADED
    return fleet_pb2.Load(
        hosted=[Hosted(kind=kinds.CONTROLNET, name=name, digest="ab", state=state) for name in HOSTED]
    )
