"""Where a service's own socket for links is: where others find it, and where nobody else may put one."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest

from bottega.transport import own_socket


def test_it_is_in_the_folder_that_systemd_made_for_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/bottega-worker/a:/run/other")
    assert own_socket("worker") == Path("/run/bottega-worker/a/links.sock")


def test_else_it_is_in_a_folder_of_this_user_alone_and_no_two_services_share_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    socket = own_socket("worker")
    assert socket.parent.parent == tmp_path
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert own_socket("worker") == socket
    assert own_socket("controlnet") != socket
