"""Tenants under the shipped unit of the gateway: root writes their file, and another user, the gateway, reads it.

The unit's user and group, its ExecStart and its groups file come from what is shipped, in a root folder of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bottega.client import Client
from bottega.client.transport.calls import RetryPolicy
from bottega.errors import Unauthenticated
from bottega.rpc.security.tenant_file import GROUP
from tests.support.other_user import USER, command_of_another, needs_root
from tests.support.services import gateway_config, wait_until_serving
from tests.support.waiting import wait_until

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
UNIT = DEPLOY / "systemd/bottega-gateway.service"
PYTHON = Path(sys.executable)
# A gateway looks at the file once a second, and its callers share the machine.
_SEEN_S = 10.0

pytestmark = [
    needs_root,
    pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="there is no systemd-sysusers here"),
    pytest.mark.skipif(
        bool(
            shutil.which("unshare") is None
            or subprocess.call(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL)
        ),
        reason="there can be no mount namespaces here",
    ),
]


@pytest.fixture
def root() -> Iterator[Path]:
    """A root folder that other users may look into, with the groups that the shipped file makes."""
    with tempfile.TemporaryDirectory(prefix="bottega-root-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "etc/bottega").mkdir(parents=True)
        (folder / "var/lib/bottega-gateway").mkdir(parents=True)
        (folder / "stash").mkdir()
        sysusers = folder / "usr/lib/sysusers.d"
        sysusers.mkdir(parents=True)
        shutil.copy(DEPLOY / "sysusers/bottega.conf", sysusers)
        subprocess.run(["systemd-sysusers", f"--root={folder}", "bottega.conf"], check=True, timeout=30)
        yield folder


def _group_id(root: Path, name: str) -> int:
    for line in (root / "etc/group").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split(":")[2])
    raise AssertionError(f"the shipped file makes no group {name}")


def _bottega(root: Path, *words: str) -> str:
    """Run the command as root of that root folder: its groups are those of the machine."""
    program = 'mount --bind "$0/etc/group" /etc/group && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", program, str(root), PYTHON, "-m", "bottega.client.cli", *words],
        env={**os.environ, "BOTTEGA_CONFIG": str(root / "etc/bottega")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _start(root: Path) -> subprocess.Popen[bytes]:
    """Start the gateway as the shipped unit does: as a user of its own, with the unit's group and no other."""
    unit = UNIT.read_text()
    assert "DynamicUser=yes" in unit
    assert f"Group={GROUP}\n" in unit
    assert "ExecStart=/opt/bottega/run bottega.gateway --config /etc/bottega/gateway.yaml\n" in unit
    config = gateway_config(tenants=str(root / "etc/bottega/tenants.json"))
    (root / "etc/bottega/gateway.yaml").write_text(yaml.safe_dump(config))
    state = root / "var/lib/bottega-gateway"
    group = _group_id(root, GROUP)
    os.chown(state, USER, group)
    state.chmod(0o700)
    with (root / "gateway.log").open("wb") as log:
        command = [str(PYTHON), "-m", "bottega.gateway", "--config", str(root / "etc/bottega/gateway.yaml")]
        return subprocess.Popen(
            command_of_another(command, group=group, stash=root / "stash"),
            stdin=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "BOTTEGA_STATE": str(state), "HOME": str(state)},
            cwd=root,
            umask=0o077,
        )


def _is_known(address: str, key: str) -> bool:
    with Client(address, api_key=key, retry=RetryPolicy(reach_s=20.0)) as client:
        try:
            client.models()
        except Unauthenticated:
            return False
        return True


def test_a_gateway_of_another_user_has_the_tenants_that_root_adds_rotates_and_disables(root: Path) -> None:
    first = _bottega(root, "tenants", "add", "shop")
    process = _start(root)
    try:
        said = wait_until_serving(process, root / "gateway.log")
        address = said["address"]
        assert _is_known(address, first)
        second = _bottega(root, "tenants", "rotate", "shop")
        wait_until(lambda: _is_known(address, second), "what was changed", within_s=_SEEN_S)
        assert not _is_known(address, first)
        _bottega(root, "tenants", "disable", "shop")
        wait_until(lambda: not _is_known(address, second), "what was changed", within_s=_SEEN_S)
        _bottega(root, "tenants", "disable", "shop", "--undo")
        wait_until(lambda: _is_known(address, second), "what was changed", within_s=_SEEN_S)
        file = root / "etc/bottega/tenants.json"
        assert (file.stat().st_uid, oct(file.stat().st_mode & 0o777)) == (0, "0o640"), "it reads, and does not write"
    finally:
        process.terminate()
        process.wait(30)
