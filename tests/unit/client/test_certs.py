"""`bottega certs`: what it writes, what it says, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bottega.client.cli.certs import command
from bottega.rpc.security.tls import TlsConfig, TlsFiles


def _run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, [*arguments, "--folder", str(folder)], catch_exceptions=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "certs"
    assert _run(made, "init").exit_code == 0
    return made


def test_a_newcomer_gets_files_that_a_service_can_use(folder: Path) -> None:
    issued = _run(folder, "issue", "gateway/main", "worker/gpu-1")
    assert issued.exit_code == 0
    assert f"worker/gpu-1: {folder / 'worker-gpu-1.pem'} and {folder / 'worker-gpu-1.key'}" in issued.output
    files = TlsConfig(
        certificate=str(folder / "worker-gpu-1.pem"),
        key=str(folder / "worker-gpu-1.key"),
        authority=str(folder / "authority.pem"),
    )
    identity = TlsFiles(files).material.identity
    assert str(identity) == "worker/gpu-1"
    shown = _run(folder, "show").output
    assert "the authority" in shown
    assert "gateway/main" in shown
    assert "in 90 days" in shown
    assert _run(folder).output == shown, "without a command"
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {0o600}


def test_nothing_that_is_there_is_replaced_but_by_renew(folder: Path) -> None:
    _run(folder, "issue", "worker/gpu-1")
    before = (folder / "worker-gpu-1.pem").read_bytes()
    assert _run(folder, "init").exit_code != 0
    again = _run(folder, "issue", "worker/gpu-1")
    assert again.exit_code != 0
    assert "bottega certs renew worker/gpu-1" in again.output
    assert (folder / "worker-gpu-1.pem").read_bytes() == before
    assert "No certificate expires" in _run(folder, "renew").output
    assert (folder / "worker-gpu-1.pem").read_bytes() == before
    assert _run(folder, "renew", "worker/gpu-1", "--days", "7").exit_code == 0
    assert (folder / "worker-gpu-1.pem").read_bytes() != before
    assert "in 7 days  SOON" in _run(folder, "show").output
    assert "worker/gpu-1 renewed" in _run(folder, "renew").output, "it expires within 30 days"


def test_a_name_that_is_none_is_refused_with_what_would_be_one(folder: Path) -> None:
    refused = _run(folder, "issue", "king/gpu-1")
    assert refused.exit_code == 2
    assert "not of the form ROLE/NAME" in refused.output
    assert "gateway, worker, encode, decode, controlnet" in refused.output
    assert "local" not in refused.output.partition("Roles")[2]
