"""deploy/install.sh in a folder root: installs, finds nothing to do, upgrades and goes back with a job, uninstalls.

pip gets no network here: what Bottega needs of others is lent from this environment, and its own packages are built.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bottega.client.suite.plan import free_ports
from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.services import Service, wait_until_serving

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("protos", "libs", "services", "kernels", "deploy")
LONG_S = 240.0


class Machine:
    """A root folder, a checkout to install from, and the environment in which that is done."""

    def __init__(self, folder: Path) -> None:
        self.root, self.checkout = folder / "root", folder / "checkout"
        self._logs = folder
        lent = folder / "lent"
        lent.mkdir()
        for path in Path(pytest.__file__).parents[1].iterdir():
            if not ("bottega" in path.name or path.suffix == ".pth" or path.name.startswith("pip")):
                (lent / path.name).symlink_to(path)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("BOTTEGA", "PIP_"))}
        quick = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_COMPILE": "1"}
        # protoc looks for the plugins of the lent packages in PATH, where pip puts those that it installs for a build.
        found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {**inherited, **quick, "PYTHONPATH": str(lent), "PATH": found}

    @property
    def current(self) -> str:
        return (self.root / "opt/bottega/current").readlink().name

    @property
    def releases(self) -> set[str]:
        return {path.name for path in (self.root / "opt/bottega/releases").iterdir()}

    def install(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / "deploy/install.sh", *command, "--root", self.root, "--python", sys.executable],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LONG_S,
            check=False,
            umask=0o027,
        )

    def closed_to_others(self) -> list[Path]:
        """What of releases and configurations a service, a user of its own, could not read."""
        found = []
        for folder in (self.root, *self.root.glob("opt/**/*"), *self.root.glob("etc/bottega/**/*")):
            needed = 0o5 if folder.is_dir() else 0o4
            if folder.stat().st_mode & needed != needed and "share" not in folder.parts:
                found.append(folder)
        return found

    def copy_release(self, name: str, copy: str) -> None:
        """Makes a release of what another one has."""
        folder = self.root / "opt/bottega/releases"
        shutil.copytree(folder / name, folder / copy, symlinks=True)

    def start_gateway(self, name: str) -> Service:
        log = self._logs / f"{name}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [self.root / "opt/bottega/run", "bottega.gateway", "--config", self.root / "etc/bottega/gateway.yaml"],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**self._environment, "BOTTEGA_STATE": str(self.root / "var/lib/bottega-gateway")},
            )
        try:
            said = wait_until_serving(process, log)
        except BaseException:
            process.kill()
            process.wait()
            raise
        where = {key: said[key] for key in ("address", "metrics", "fleet")}
        return Service(name=name, process=process, log=log, **where)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", "*_pb2*")
    for name in SOURCES:
        shutil.copytree(ROOT / name, machine.checkout / name, ignore=ignored)
    shutil.copy(ROOT / "constraints.txt", machine.checkout)
    return machine


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Machine]:
    """One on which nothing gets so far as to be built."""
    machine = Machine(tmp_path)
    machine.checkout = ROOT
    yield machine
    assert not list(machine.root.rglob("releases/*"))


def test_what_cannot_be_done_is_said(bare: Machine) -> None:
    for command, said in (
        ("rollback", "there is no folder"),
        ("uninstall", "there is no folder"),
        ("instal", "unknown command instal"),
        ("install --services gateway,clock", "--services gateway,clock: must be all"),
        ("install --keep 0", "--keep 0: must be"),
        ("install --fast", "unknown option --fast"),
    ):
        done = bare.install(*command.split())
        assert done.returncode in {1, 2}
        assert said in done.stdout
        assert "Traceback" not in done.stdout


def test_whoever_is_not_root_is_told_so_before_anything_is_made(tmp_path: Path) -> None:
    other = tmp_path / "id"
    other.write_text("#!/bin/sh\necho 1000\n")
    other.chmod(0o755)
    done = subprocess.run(
        [ROOT / "deploy/install.sh", "rollback"],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (done.returncode, "only root may change" in done.stderr, "--root FOLDER" in done.stderr) == (2, True, True)


@asynccontextmanager
async def running_gateway(machine: Machine, name: str) -> AsyncIterator[image_pb2_grpc.ImageServiceAsyncStub]:
    """The gateway of the release that is current, and a stub to ask it."""
    gateway = await asyncio.to_thread(machine.start_gateway, name)
    channel = open_channel(gateway.address)
    try:
        yield image_pb2_grpc.ImageServiceStub(channel)
    finally:
        await channel.close()
        assert await asyncio.to_thread(gateway.stop) == 0


async def completed(images: image_pb2_grpc.ImageServiceAsyncStub, job_id: str) -> None:
    async with asyncio.timeout(20):
        while True:
            job = (await images.GetJob(image_pb2.GetJobRequest(job_id=job_id), timeout=10)).job
            if job.state == image_pb2.JOB_STATE_COMPLETED:
                return
            await asyncio.sleep(0.1)


# pip makes an environment and builds four packages; on a machine with other work that alone takes two minutes.
@pytest.mark.timeout(300)
async def test_releases_come_and_go_and_a_job_stays(machine: Machine) -> None:
    async def install(*command: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(machine.install, *command)

    (machine.checkout / "libs/bottega/config.py").chmod(0o600)
    done = await install("install", "--with", "bottega-libs[otel]")
    assert done.returncode == 0, done.stdout
    assert machine.closed_to_others() == []
    etc, first = machine.root / "etc", machine.current
    config = etc / "bottega/gateway.yaml"
    assert (etc / "systemd/system/bottega-worker@.service").read_text() == (
        ROOT / "deploy/systemd/bottega-worker@.service"
    ).read_text()
    assert "bottega-links" in (etc / "group").read_text()
    assert (machine.root / "usr/local/bin/bottega").resolve().is_file(), "it is of this root"
    assert f"{machine.root}/opt/bottega/run bottega.gateway" in done.stdout

    address, fleet = (f"127.0.0.1:{port}" for port in free_ports(2))
    server = f"server: {{listen: '{address}', metrics_listen: '127.0.0.1:0', drain_grace_s: 0.5}}"
    config.write_text(f"{server}\nfleet: {{listen: '{fleet}'}}\n")
    done = await install("install")
    assert (done.returncode, machine.current, len(machine.releases)) == (0, first, 1), done.stdout
    assert config.read_text().startswith("server: {"), "a configuration is its owner's"

    async with running_gateway(machine, "first") as images:
        worker = ScriptedWorker("w1", fleet)
        worker.script.hold_at = 1
        await worker.start()
        spec = GenerationSpec(prompt="a star")
        request = image_pb2.SubmitJobRequest(request_id="order-1", spec=spec)
        job_id = (await images.SubmitJob(request, timeout=10, wait_for_ready=True)).job.job_id
        await asyncio.wait_for(worker.arrived.wait(), 10)

    # The next checkout differs by a line. A build takes long and was shown above: its release is what the first one is.
    with (machine.checkout / "services/bottega/gateway/config.py").open("a") as file:
        file.write("\n# another release\n")
    await asyncio.to_thread(machine.copy_release, first, (await install("status")).stdout.split()[-1])
    good = config.read_text()
    config.write_text(f"{good}colour: red\n")
    done = await install("install")
    assert (done.returncode, machine.current) == (1, first)
    assert "colour: unknown key" in done.stdout

    config.write_text(good)
    done = await install("install")
    second = machine.current
    assert (done.returncode, second == first) == (0, False), done.stdout
    worker.script.release.set()
    async with running_gateway(machine, "second") as images:
        await completed(images, job_id)

    done = await install("rollback")
    assert (done.returncode, machine.current) == (0, first), done.stdout
    status = (await install("status")).stdout
    assert f"{first} (current)" in status
    assert f"{second} (previous)" in status
    await worker.leave()
    await worker.die()

    assert (await install("uninstall")).returncode == 0
    assert not list((etc / "systemd/system").iterdir())
    assert (await install("status")).returncode == 1
    assert not (machine.root / "opt/bottega").exists()
    assert config.read_text() == good
    assert (await install("uninstall", "--purge")).returncode == 0
    assert not (etc / "bottega").exists()
    assert not list((machine.root / "var/lib").glob("*"))
