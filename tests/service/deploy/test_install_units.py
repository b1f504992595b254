"""Which units deploy/install.sh removes: those that its releases brought along, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stubbed_machine import StubbedMachine

OTHERS = (
    "bottega-clock.service",  # of a service that is no part of Bottega
    "bottega-worker@miniature.service",  # `systemctl edit --full` of an instance
    "bottega-backup.timer",  # an operator's
    "bottega.target.wants/bottega-clock.service",
    "bottega-gateway.service.d/override.conf",
)
OLD, OLD_INSTANCES = "bottega-old.service", "bottega-old-worker@.service"


@pytest.fixture
def machine(tmp_path: Path) -> StubbedMachine:
    """Its first release has two units that the next one will not have; then others put theirs beside them."""
    machine = StubbedMachine(tmp_path)
    for unit in (OLD, OLD_INSTANCES):
        (machine.checkout / "deploy/systemd" / unit).write_text("[Service]\n")
    machine.install()
    for unit in OTHERS:
        (machine.units / unit).parent.mkdir(exist_ok=True)
        (machine.units / unit).write_text("[Unit]\n")
    for unit in (OLD, OLD_INSTANCES):
        (machine.checkout / "deploy/systemd" / unit).unlink()
    return machine


def test_an_upgrade_removes_units_that_the_release_before_had_and_no_others(machine: StubbedMachine) -> None:
    assert (machine.units / OLD).exists()
    machine.online = True
    enabled = machine.units / "bottega.target.wants" / OLD
    enabled.symlink_to(f"/etc/systemd/system/{OLD}")
    machine.set_units(old="failed", **{"old-worker_at_a": "active"}, gateway="active", clock="active")
    machine.install()
    asked = (machine.stubs / "systemctl.asked").read_text()
    assert [line for line in asked.splitlines() if line.startswith("stop")] == [
        "stop bottega-old-worker@a.service",
        f"stop {OLD}",
    ]
    assert "restart bottega-gateway.service" in asked
    assert "restart bottega-old" not in asked, "though it had failed"
    assert not enabled.is_symlink(), "it would point nowhere"
    assert not (machine.units / OLD).exists()
    assert not (machine.units / OLD_INSTANCES).exists()
    assert [unit for unit in OTHERS if not (machine.units / unit).exists()] == []
    assert machine.run("rollback").returncode == 0
    assert (machine.units / OLD).exists()


def test_uninstall_removes_units_of_releases_with_their_links_and_no_others(machine: StubbedMachine) -> None:
    machine.install()
    enabled = [
        machine.units / "bottega.target.wants/bottega-worker@a.service",
        machine.units / "bottega.target.wants/bottega-gateway.service",
        machine.units / "multi-user.target.wants/bottega.target",
    ]
    enabled[2].parent.mkdir()
    for link in enabled:
        link.symlink_to(f"/etc/systemd/system/{link.name.replace('@a', '@')}")
    machine.online = True
    machine.set_units(gateway="active", clock="active")
    with (machine.stubs / "units.txt").open("a") as file:
        file.write("bottega-backup.timer active\nbottega.target active\n")
    done = machine.run("uninstall")
    assert done.returncode == 0, done.stdout
    assert machine.asked("stop") == ["bottega-gateway.service", "bottega-clock.service", "bottega.target"]
    left = {str(path.relative_to(machine.units)) for path in machine.units.rglob("*") if not path.is_dir()}
    assert left == set(OTHERS)


def test_uninstall_without_a_release_touches_no_unit(tmp_path: Path) -> None:
    machine = StubbedMachine(tmp_path)
    link = machine.units / "multi-user.target.wants/ssh.service"
    link.parent.mkdir(parents=True)
    link.symlink_to("/usr/lib/systemd/system/ssh.service")
    (machine.root / "etc/bottega").mkdir()
    assert machine.run("uninstall", "--purge").returncode == 0
    assert link.is_symlink()
