"""Starts a suite in the background, stops one, and ends what one left whose supervisor was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil

from bottega.client.instance import AlreadyHeld, InstanceProcess, InstanceRecord, StateFolder
from bottega.client.suite.plan import SuiteOptions
from bottega.errors import BottegaError, Code, DeadlinePassed
from bottega.state_folder import private_files

# Without a sign of progress: a service that starts slowly says how far it is, and is given up itself before.
_START_STALL_S = 300.0
# The services' drain, the supervisor's patience with them, and some air.
_STOP_S = 30.0
_LOOK_S = 0.1
_ORPHAN_GRACE_S = 3.0


class DidNotStart(BottegaError):
    """A background instance ended before it was ready; the message is what it said."""

    code = Code.FAILED_PRECONDITION


def start_in_background(
    options: SuiteOptions, state: StateFolder, on_progress: Callable[[str], None]
) -> InstanceRecord:
    """Start an instance, and return its record when it is ready.

    Args:
        options: What to run.
        state: From which folder.
        on_progress: Told how far services are whose start takes long.

    Raises AlreadyHeld, StateFolderUnusable; DidNotStart with what it said; DeadlinePassed when it is still not ready.
    """
    if state.is_held():
        raise AlreadyHeld(state.holders())
    state.make()
    said = state.logs / "up.out"
    values = asdict(options)
    values |= values.pop("services")
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    with private_files(), said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "bottega.client.cli", "up", "--in-background", f"--state={state.root}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _wait_until_ready(process, state, said, on_progress)
    except BaseException:
        process.terminate()
        raise


def stop_instance(state: StateFolder) -> bool:
    """Stops the instance that runs from `state` and waits until it is gone; False when there is none.

    Raises DeadlinePassed when it does not end.
    """
    record = state.read()
    if not state.is_held() or record is None:
        return False
    os.kill(record.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _STOP_S
    while state.is_held():
        if time.monotonic() > deadline_s:
            raise DeadlinePassed(f"process {record.pid} did not end within {_STOP_S:.0f} s")
        time.sleep(_LOOK_S)
    return True


def end_orphans(record: InstanceRecord | None) -> tuple[str, ...]:
    """Ends the children of a dead instance with their process groups, and says their names."""
    found = [(child, process) for child in (record.children if record else ()) if (process := _alive(child))]
    for _, process in found:
        process.terminate()
    psutil.wait_procs([process for _, process in found], timeout=_ORPHAN_GRACE_S)
    for child, process in found:
        if process.is_running():
            os.killpg(child.pid, signal.SIGKILL)
    return tuple(child.name for child, _ in found)


def _wait_until_ready(
    process: subprocess.Popen[bytes], state: StateFolder, said: Path, on_progress: Callable[[str], None]
) -> InstanceRecord:
    last: InstanceRecord | None = None
    deadline_s = time.monotonic() + _START_STALL_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise DidNotStart(said.read_text(errors="replace").strip() or "it ended without a word")
        record = state.read()
        if record and record.ready and record.pid == process.pid:
            return record
        if record and record.pid == process.pid and record != last:
            if record.starting and (last is None or record.starting != last.starting):
                on_progress(record.starting)
            last, deadline_s = record, time.monotonic() + _START_STALL_S
        time.sleep(_LOOK_S)
    raise DeadlinePassed("the suite was not ready in time; bottega logs says how far it came")


def _alive(child: InstanceProcess) -> psutil.Process | None:
    try:
        process = psutil.Process(child.pid)
        return process if abs(process.create_time() - child.started_s) < 1.0 else None
    except psutil.NoSuchProcess:
        return None
