"""What deploy/install.sh asks systemd to restart and to stop, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stubbed_machine import StubbedMachine

GATEWAY = "bottega-gateway.service"


@pytest.fixture
def machine(tmp_path: Path) -> StubbedMachine:
    """Two releases were installed, of which the second is current."""
    machine = StubbedMachine(tmp_path)
    machine.install()
    machine.change_checkout("the second")
    machine.install()
    machine.online = True
    return machine


def test_the_way_back_takes_along_what_failed_and_what_still_starts(machine: StubbedMachine) -> None:
    machine.set_units(
        gateway="failed",
        cache="inactive",
        loras="reloading",
        **{"worker_at_a": "active", "worker_at_b": "activating", "worker_at_gateway-gpu0": "active"},
    )
    done = machine.run("rollback")
    assert done.returncode == 0, done.stdout
    assert machine.asked("restart") == [
        "bottega-loras.service",
        "bottega-worker@a.service",
        "bottega-worker@b.service",
        "bottega-worker@gateway-gpu0.service",
        GATEWAY,
    ]


def test_no_restart_restarts_nothing_and_a_gateway_that_is_not_here_stays_so(machine: StubbedMachine) -> None:
    machine.set_units(gateway="inactive", worker_at_a="active")
    assert machine.run("rollback", "--no-restart").returncode == 0
    assert machine.asked("restart") == []
    assert machine.run("rollback").returncode == 0
    assert machine.asked("restart") == ["bottega-worker@a.service"]


def test_the_way_back_goes_on_behind_a_service_that_does_not_start(machine: StubbedMachine) -> None:
    machine.set_units(gateway="failed", worker_at_a="active", worker_at_b="active")
    (machine.stubs / "failing.txt").write_text("bottega-worker@a.service")
    done = machine.run("rollback")
    assert done.returncode == 1
    assert machine.asked("restart") == ["bottega-worker@a.service", "bottega-worker@b.service", GATEWAY]
    assert "journalctl -u bottega-worker@a.service" in done.stdout
    assert "systemctl status bottega-worker@a.service" in done.stdout
    assert "these services do not start: bottega-worker@a.service\n" in done.stdout
    assert "install.sh rollback" not in done.stdout, "it would lead to the release that is left"


def test_an_upgrade_ends_at_the_first_that_ran_and_does_not_start(machine: StubbedMachine) -> None:
    machine.set_units(gateway="active", worker_at_a="failed", worker_at_b="active", worker_at_c="active")
    (machine.stubs / "failing.txt").write_text("bottega-worker@a.service bottega-worker@b.service")
    machine.change_checkout("the third")
    done = machine.run("install", "--python", str(machine.stubs / "python"))
    assert done.returncode == 1
    assert machine.asked("restart") == ["bottega-worker@a.service", "bottega-worker@b.service"]
    assert "journalctl -u bottega-worker@b.service" in done.stdout
    assert "install.sh rollback" in done.stdout
