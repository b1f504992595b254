"""Starts and stops a suite in the background, and ends processes that a killed suite left behind."""

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

# Seconds without progress. A slow service reports its progress, and the supervisor gives up on it before this time.
_START_STALL_S = 300.0
# Seconds to stop: the services' drain, the supervisor's grace, and a margin.
_STOP_S = 30.0
_LOOK_S = 0.1
_ORPHAN_GRACE_S = 3.0


class DidNotStart(BottegaError):
    """The error that a suite in the background ended before it was ready. The message is its output."""

    code = Code.FAILED_PRECONDITION


def start_in_background(
    options: SuiteOptions, state: StateFolder, on_progress: Callable[[str], None]
) -> InstanceRecord:
    """Start a suite in the background, and return its record when it is ready.

    Args:
        options: What to run.
        state: The folder to run from.
        on_progress: Called with the progress of services that are slow to start, as text.

    Raises:
        AlreadyHeld: A suite already runs from this folder.
        StateFolderUnusable: The folder cannot be used.
        DidNotStart: The suite ended.
        DeadlinePassed: The suite was not ready in time.
    """
    if state.is_held():
        raise AlreadyHeld(state.holders())
    state.make()
    output_file = state.logs / "up.out"
    values = asdict(options)
    values |= values.pop("services")
    several = {"model": values.pop("models"), "model_name": values.pop("model_names")}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    arguments += [f"--{name.replace('_', '-')}={value}" for name, given in several.items() for value in given]
    with private_files(), output_file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "bottega.client.cli", "up", "--in-background", f"--state={state.root}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _wait_until_ready(process, state, output_file, on_progress)
    except BaseException:
        process.terminate()
        raise


def stop_instance(state: StateFolder) -> bool:
    """Stop the suite that runs from a folder, and wait for its end. Return False if there is none.

    Raises DeadlinePassed if it does not end.
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
    """Kill the services that a killed suite left behind, with their process groups, and return their names."""
    found = [(child, process) for child in (record.children if record else ()) if (process := _alive(child))]
    for _, process in found:
        process.terminate()
    psutil.wait_procs([process for _, process in found], timeout=_ORPHAN_GRACE_S)
    for child, process in found:
        if process.is_running():
            os.killpg(child.pid, signal.SIGKILL)
    return tuple(child.name for child, _ in found)


def _wait_until_ready(
    process: subprocess.Popen[bytes], state: StateFolder, output_file: Path, on_progress: Callable[[str], None]
) -> InstanceRecord:
    last: InstanceRecord | None = None
    deadline_s = time.monotonic() + _START_STALL_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise DidNotStart(output_file.read_text(errors="replace").strip() or "the suite ended without any output")
        record = state.read()
        if record and record.ready and record.pid == process.pid:
            return record
        if record and record.pid == process.pid and record != last:
            if record.starting and (last is None or record.starting != last.starting):
                on_progress(record.starting)
            last, deadline_s = record, time.monotonic() + _START_STALL_S
        time.sleep(_LOOK_S)
    raise DeadlinePassed("the suite was not ready in time; see bottega logs")


def _alive(child: InstanceProcess) -> psutil.Process | None:
    try:
        process = psutil.Process(child.pid)
        return process if abs(process.create_time() - child.started_s) < 1.0 else None
    except psutil.NoSuchProcess:
        return None
