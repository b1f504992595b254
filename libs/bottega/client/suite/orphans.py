"""Ends the processes of a suite whose supervisor was killed."""

from __future__ import annotations

import os
import signal

import psutil

from bottega.client.instance import InstanceProcess, InstanceRecord

_GRACE_S = 3.0


def end_orphans(record: InstanceRecord | None) -> tuple[str, ...]:
    """Ends the children of a dead instance with their process groups, and says their names."""
    found = [(child, process) for child in (record.children if record else ()) if (process := _alive(child))]
    for _, process in found:
        process.terminate()
    psutil.wait_procs([process for _, process in found], timeout=_GRACE_S)
    for child, process in found:
        if process.is_running():
            os.killpg(child.pid, signal.SIGKILL)
    return tuple(child.name for child, _ in found)


def _alive(child: InstanceProcess) -> psutil.Process | None:
    try:
        process = psutil.Process(child.pid)
        return process if abs(process.create_time() - child.started_s) < 1.0 else None
    except psutil.NoSuchProcess:
        return None
