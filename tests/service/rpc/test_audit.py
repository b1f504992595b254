"""The audit log of a real server: who did what, and how it ended; and what it never says."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from bottega.errors import ConfigError
from bottega.rpc.channel import Target
from bottega.rpc.operation import audit
from bottega.rpc.operation.audit import AuditLog
from bottega.rpc.security.caller import AUDITED, METHOD_ROLES, Caller, Role
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.v1 import lora_pb2, lora_pb2_grpc
from tests.support import lost_files
from tests.support.certificates import Authority
from tests.support.waiting import wait_until

ANNA = Caller(role=Role.OPERATOR, name="anna")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Loras(lora_pb2_grpc.LoraServiceServicer):
    async def DeleteLora(self, request: lora_pb2.DeleteLoraRequest, context: object) -> lora_pb2.DeleteLoraResponse:
        return lora_pb2.DeleteLoraResponse()

    async def GetLora(self, request: lora_pb2.GetLoraRequest, context: object) -> lora_pb2.GetLoraResponse:
        return lora_pb2.GetLoraResponse()


def test_what_is_audited_is_of_the_contract() -> None:
    assert METHOD_ROLES.keys() >= AUDITED


async def test_changes_are_noted_with_who_made_them_and_how_they_ended(tmp_path: Path) -> None:
    authority, path = Authority(tmp_path / "certs"), tmp_path / "audit" / "loras.jsonl"
    server = Server("loras", ServerConfig(tls=authority.issue("loras/one"), audit=str(path), drain_grace_s=0.1))
    lora_pb2_grpc.add_LoraServiceServicer_to_server(Loras(), server.grpc)  # type: ignore[abstract]
    await server.start()
    target = Target(address=server.address, role=Role.LORAS, name="one")
    async with authority.channels("operator/anna").open(target) as channel:
        stub: lora_pb2_grpc.LoraServiceAsyncStub = lora_pb2_grpc.LoraServiceStub(channel)
        await stub.DeleteLora(lora_pb2.DeleteLoraRequest(name="water"), timeout=5)
        await stub.GetLora(lora_pb2.GetLoraRequest(name="water"), timeout=5)
    async with authority.channels("tenant/shop").open(target) as channel:
        stub = lora_pb2_grpc.LoraServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.DeleteLora(lora_pb2.DeleteLoraRequest(name="water"), timeout=5)
    await server.stop()
    done, refused = _lines(path)
    assert {name: done[name] for name in ("service", "role", "name", "host", "method", "about", "outcome")} == {
        "service": "loras",
        "role": "operator",
        "name": "anna",
        "host": "127.0.0.1",
        "method": "LoraService/DeleteLora",
        "about": {"name": "water"},
        "outcome": "OK",
    }
    assert (refused["role"], refused["name"], refused["tenant"]) == ("tenant", "shop", "shop")
    assert refused["outcome"] == "PERMISSION_DENIED"
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_are_bounded_and_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_FILE_BYTES", 2000)
    monkeypatch.setattr(audit, "_FILES", 2)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, service="gateway")
    for number in range(100):
        log.note("/a.b/C", ANNA, "h", about={"name": f"100%d {number}"}, outcome="OK", seconds=0.0)
    log.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    assert _lines(path)[-1]["about"] == {"name": "100%d 99"}
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 3 * 2000


@pytest.mark.parametrize("lose", [lost_files.unlink, lost_files.move, lost_files.replace_by_nothing])
def test_lines_go_to_the_file_that_has_the_name(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, service="gateway")
    log.note("/a.b/C", ANNA, "h", about={"name": "before"}, outcome="OK", seconds=0.0)
    wait_until(lambda: path.stat().st_size > 0, "the line to be written")
    lose(path)
    log.note("/a.b/C", ANNA, "h", about={"name": "after"}, outcome="OK", seconds=0.0)
    log.close()
    assert [line["about"]["name"] for line in _lines(path)] == ["after"]


def test_a_disk_that_is_slow_holds_up_nobody_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_MAX_WAITING", 1)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, service="gateway")
    for _ in range(5000):
        log.note("/a.b/C", None, "h", about={}, outcome="UNAUTHENTICATED", seconds=0.0)
    log.close()
    log = AuditLog(path, service="gateway")
    log.note("/a.b/C", None, "h", about={}, outcome="OK", seconds=0.0)
    log.close()
    lines = _lines(path)
    missing = sum(line.get("missing", 0) for line in lines)
    written = sum("role" in line for line in lines)
    assert written + missing + log._missing <= 5001
    assert written < 5001
    assert {line["role"] for line in lines if "role" in line} == {"unknown"}


def test_a_file_that_cannot_be_written_keeps_the_service_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"server\.audit .* cannot be written"):
        AuditLog(tmp_path / "file" / "audit.jsonl", service="gateway")


def test_a_disk_that_fails_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", service="gateway")

    def fail(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(log._file, "shouldRollover", fail)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            log.note("/a.b/C", ANNA, "h", about={}, outcome="OK", seconds=0.0)
        log.close()
    assert caplog.text.count("the audit log cannot be written") == 1
