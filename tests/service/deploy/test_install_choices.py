"""What was chosen for a release of deploy/install.sh counts for the next one, where nothing else is said."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.other_user import needs_root
from tests.support.stubbed_machine import StubbedMachine


@pytest.fixture
def machine(tmp_path: Path) -> StubbedMachine:
    return StubbedMachine(tmp_path)


def packages(machine: StubbedMachine) -> list[str]:
    """What pip was asked for last, but for its options, without folders and extras that all releases have."""
    line = (machine.stubs / "pip.asked").read_text().splitlines()[-1]
    words = [
        word.removesuffix(",sandbox]")
        for word in line.split()
        if not word.endswith(("/protos", "/libs", "/libs[client]", "/libs/serving", "/libs/weights"))
    ]
    return [word.rpartition("/services")[2] for word in words[words.index("-c") + 2 :]]


def chosen(machine: StubbedMachine) -> list[str]:
    done = machine.run("status")
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if line.startswith(("services ", "kernels ", "with "))]


def test_services_stay_those_that_were_chosen(machine: StubbedMachine) -> None:
    machine.install("--services", "gateway")
    first = machine.current
    machine.install()
    assert machine.releases == {first}, "nothing is another release"
    machine.change_checkout("the second")
    machine.install()
    assert packages(machine) == ["[gateway"]
    machine.install("--services", "all")
    assert packages(machine) == ["[activations,cache,controlnet,gateway,http,loras,worker"]


def test_kernels_and_packages_stay_until_they_are_taken_out(machine: StubbedMachine) -> None:
    machine.install("--services", "worker", "--kernels", "--with", "bottega-libs[otel]")
    machine.install("--with", "clock @ https://clocks.example/clock.whl", "--with", "bottega-libs[otel]")
    kept = ["with bottega-libs[otel]", "with clock @ https://clocks.example/clock.whl"]
    assert chosen(machine) == ["services worker", "kernels yes", *kept]
    machine.change_checkout("the second")
    machine.install()
    asked = packages(machine)
    assert asked[1].endswith("/kernels")
    assert [asked[0], *asked[2:]] == ["[worker", "bottega-libs[otel]", "clock", "@", "https://clocks.example/clock.whl"]

    done = machine.run("install", "--without", "otel")
    assert (done.returncode, "was not installed with --with" in done.stdout) == (2, True)
    machine.install("--no-kernels", "--without", "bottega-libs[otel]")
    assert chosen(machine) == ["services worker", "kernels no", kept[1]]
    assert machine.run("rollback").returncode == 0
    assert chosen(machine) == ["services worker", "kernels yes", *kept]


def test_an_upgrade_that_did_not_start_everything_is_run_again_as_it_was(machine: StubbedMachine) -> None:
    machine.install("--with", "clock")
    machine.online = True
    machine.set_units(gateway="active")
    (machine.stubs / "failing.txt").write_text("bottega-gateway.service\n")
    again = ("install", "--python", str(machine.stubs / "python"), "--without", "clock")
    assert machine.run(*again).returncode == 1
    (machine.stubs / "failing.txt").write_text("")
    done = machine.run(*again)
    assert done.returncode == 0, done.stdout
    assert chosen(machine) == ["services all", "kernels no"]


def test_a_package_of_this_machine_is_another_release_when_it_has_changed(
    machine: StubbedMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = tmp_path / "build/clock"
    clock.mkdir(parents=True)
    (clock / "clock.py").write_text("HOURS = 12\n")
    monkeypatch.chdir(clock.parent)
    machine.install("--with", "./clock")
    monkeypatch.chdir(tmp_path.parent)
    machine.install()
    (clock / "build").mkdir()
    (clock / "build/clock.py").write_text("left by pip\n")
    machine.install()
    assert len(machine.releases) == 1
    (clock / "clock.py").write_text("HOURS = 24\n")
    machine.install()
    assert len(machine.releases) == 2
    assert packages(machine)[1:] == [str(clock)]


@needs_root
def test_a_python_that_other_users_cannot_execute_is_refused(machine: StubbedMachine, tmp_path: Path) -> None:
    """As one in root's home: units are users of their own."""
    closed = tmp_path / "closed/python3.11"
    closed.parent.mkdir(mode=0o700)
    shutil.copy2(Path(sys._base_executable).resolve(), closed)  # type: ignore[attr-defined]  # missing in its types
    if subprocess.run([closed, "-c", "import venv, ensurepip"], check=False).returncode:
        pytest.skip("an interpreter finds its library by where it is, here")
    machine.online = True
    done = machine.run("install", "--python", str(closed))
    assert (done.returncode, f"services run as other users, and these cannot execute {closed}" in done.stdout) == (
        2,
        True,
    ), done.stdout
    assert "--python PATH" in done.stdout
    assert not list(machine.root.rglob("releases/*"))


def test_what_a_link_in_the_folder_of_releases_names_stays_as_it_is(machine: StubbedMachine, tmp_path: Path) -> None:
    """Whoever may write there must not have root empty another file."""
    victim = tmp_path / "victim"
    victim.write_text("important")
    machine.home.mkdir(parents=True)
    (machine.home / ".lock").symlink_to(victim)
    machine.install()
    assert victim.read_text() == "important"


def test_what_pip_cannot_install_is_not_kept(machine: StubbedMachine) -> None:
    machine.install()
    done = machine.run("install", "--python", str(machine.stubs / "python"), "--with", "unknown-package")
    assert (done.returncode, "nothing was changed" in done.stdout) == (1, True)
    assert chosen(machine) == ["services all", "kernels no"]


def test_an_option_of_pip_is_no_package(machine: StubbedMachine) -> None:
    done: subprocess.CompletedProcess[str] = machine.run("install", "--with", "--no-deps")
    assert (done.returncode, "set options of pip in its environment variables" in done.stdout) == (2, True)
    assert not machine.root.exists()
