"""Keeping a service running, with real processes that do as they are told."""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from bottega.client.suite.plan import ProcessPlan
from bottega.client.suite.service_process import DoesNotStart, Forking, RestartPolicy, ServiceProcess
from bottega.process.fork_server import ForkServer
from tests.support.services import runs
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVES = """
import json, os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(json.dumps({"event": "serving", "address": "127.0.0.1:1", "policy": os.environ["SOME"]}), flush=True)
time.sleep(60)
"""
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVES
LISTENS = "import json, sys; print(json.dumps({'event': 'serving'}), flush=True); sys.stdin.read(1); sys.exit()"
STARTING = {"event": "engine starting", "progress": "loading unet, 3.1 of 5.1 GB"}
LOADS = f"import json; print(json.dumps({STARTING}), flush=True)\n"
FAILS = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"

QUICK = RestartPolicy(first_wait_s=0.05, longest_wait_s=0.1, stop_grace_s=3.0)


class Reports:
    """A ServiceListener that remembers."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.deaths: list[tuple[str, str, float]] = []
        self.progress: list[str] = []
        self.fork_failures: list[str] = []

    def starting(self, name: str, progress: str) -> None:
        self.progress.append(progress)

    def serving(self, name: str, address: str) -> None:
        self.served.append(address)

    def died(self, name: str, how: str, wait_s: float) -> None:
        self.deaths.append((name, how, wait_s))

    def not_forked(self, reason: str) -> None:
        self.fork_failures.append(reason)


def service_process(script: str, logs: Path, reports: Reports, policy: RestartPolicy = QUICK) -> ServiceProcess:
    plan = ProcessPlan(name="worker-0", argv=(sys.executable, "-c", script), environment={"SOME": "thing"})
    return ServiceProcess(plan, logs, reports, policy)


@asynccontextmanager
async def running(found: ServiceProcess) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(found.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_killed_service_is_started_again_and_its_children_go_with_it(tmp_path: Path) -> None:
    reports = Reports()
    found = service_process(SERVES, tmp_path, reports)
    async with running(found):
        await eventually(lambda: len(reports.served) == 1)
        assert found.pid is not None
        first = psutil.Process(found.pid)
        children = first.children()
        assert len(children) == 1
        first.kill()
        await eventually(lambda: len(reports.served) == 2)
        assert reports.deaths == [("worker-0", "was killed by SIGKILL", 0.05)]
        await eventually(lambda: not any(runs(child) for child in children))
    assert '"policy": "thing"' in (tmp_path / "worker-0.log").read_text()


async def test_services_start_without_the_fork_server_when_that_is_gone(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reports = Reports()
    plan = ProcessPlan(name="worker-0", argv=(sys.executable, "-c", LISTENS), fork_after_importing="json")
    with ours:
        forking = Forking(ForkServer(ours), reports)
        first = ServiceProcess(plan, tmp_path, reports, QUICK, forking=forking)
        second = ServiceProcess(replace(plan, name="worker-1"), tmp_path, reports, QUICK, forking=forking)
        async with running(first), running(second):
            await asyncio.sleep(0)  # both ask the server
            theirs.close()
            await eventually(lambda: len(reports.served) == 2)
    assert reports.fork_failures == ["the server did not start the process"]


@pytest.mark.parametrize("script", [SERVES, DEAF], ids=["it listens", "it is killed after the grace"])
async def test_stopping_leaves_nothing(tmp_path: Path, script: str) -> None:
    reports = Reports()
    found = service_process(script, tmp_path, reports, replace(QUICK, stop_grace_s=0.2 if script == DEAF else 3.0))
    async with running(found):
        await eventually(lambda: bool(reports.served))
        assert found.pid is not None
        family = [psutil.Process(found.pid), *psutil.Process(found.pid).children()]
    await eventually(lambda: not any(runs(member) for member in family))
    assert reports.deaths == []


async def test_a_start_that_takes_long_is_told_until_the_service_serves(tmp_path: Path) -> None:
    reports, loaded = Reports(), tmp_path / "loaded"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(loaded)!r}).exists(): time.sleep(0.02)\n"
    found = service_process(LOADS + waits + LISTENS, tmp_path, reports)
    async with running(found):
        await eventually(lambda: reports.progress == ["loading unet, 3.1 of 5.1 GB"])
        assert found.progress == "loading unet, 3.1 of 5.1 GB"
        loaded.touch()
        await eventually(lambda: bool(reports.served))
        assert found.progress == ""


async def test_one_that_never_serves_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    reports = Reports()
    with pytest.raises(DoesNotStart) as caught:
        async with asyncio.timeout(60):
            await service_process(FAILS, tmp_path, reports).run()
    assert "exited with status 3" in caught.value.message
    assert caught.value.last_lines[-1] == "no such model"
    assert len(reports.deaths) == 2


async def test_each_change_of_a_service_is_reported_when_it_happens(tmp_path: Path) -> None:
    seen: list[tuple[bool, bool]] = []
    plan = ProcessPlan(name="worker-0", argv=(sys.executable, "-c", SERVES), environment={"SOME": "thing"})
    found = ServiceProcess(
        plan, tmp_path, Reports(), QUICK, on_change=lambda: seen.append((found.pid is not None, found.serving.is_set()))
    )
    async with running(found):
        await eventually(lambda: seen == [(True, False), (True, True)])
        assert found.pid is not None
        psutil.Process(found.pid).kill()
        await eventually(lambda: seen[2:] == [(False, False), (True, False), (True, True)])


async def test_one_whose_configuration_cannot_be_used_is_given_up_at_once(tmp_path: Path) -> None:
    reports = Reports()
    script = "import sys; print('the model cannot be served', file=sys.stderr); sys.exit(2)"
    with pytest.raises(DoesNotStart) as caught:
        async with asyncio.timeout(10):
            await service_process(script, tmp_path, reports).run()
    assert caught.value.message == "worker-0 does not start: its configuration cannot be used"
    assert caught.value.last_lines == ("the model cannot be served",)
    assert reports.deaths == []


async def test_one_that_has_served_is_started_again_for_ever_with_growing_waits(tmp_path: Path) -> None:
    reports = Reports()
    serves_and_dies = "import json\nprint(json.dumps({'event': 'serving'}))"
    async with running(service_process(serves_and_dies, tmp_path, reports)) as task:
        await eventually(lambda: len(reports.deaths) >= 5)
        assert not task.done()
    assert [wait_s for _, _, wait_s in reports.deaths[:4]] == [0.05, 0.1, 0.1, 0.1]


async def test_killing_does_not_wait(tmp_path: Path) -> None:
    reports = Reports()
    found = service_process(DEAF, tmp_path, reports, RestartPolicy(stop_grace_s=60.0))
    async with running(found) as task:
        await eventually(lambda: bool(reports.served))
        task.cancel()
        await asyncio.sleep(0.1)
        assert not task.done()
        found.kill()
        async with asyncio.timeout(30):  # half of the grace
            await asyncio.wait([task])
    assert found.pid is None


async def test_a_service_hears_of_it_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from pathlib import Path
from tests.service.client.test_restart_policy import LISTENS, Reports, service_process
asyncio.run(service_process(LISTENS, Path({str(tmp_path)!r}), Reports()).run())
"""
    root = Path(__file__).parents[3]
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=root)
    log = tmp_path / "worker-0.log"
    await eventually(lambda: log.exists() and "serving" in log.read_text())
    (service,) = psutil.Process(host.pid).children()
    await asyncio.sleep(0.2)
    assert runs(service)
    host.kill()
    await host.wait()
    await eventually(lambda: not runs(service))
