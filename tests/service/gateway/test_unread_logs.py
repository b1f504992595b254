"""A real gateway whose stderr nobody reads, as after Ctrl-Z on `bottega up`: it goes on answering, and ends."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.services import gateway_config
from tests.support.waiting import EVENTUALLY_S

# Jobs that are submitted and cancelled: two lines each, in all far more than pipe and queue have room for.
JOBS = 600
# Any answer; one that waits for the log would never come.
ANSWER_S = 60.0


class Unread:
    """A gateway whose stdout and stderr are a pipe of one page, of which only the line that it serves is read."""

    def __init__(self, folder: Path) -> None:
        config = folder / "gateway.yaml"
        config.write_text(json.dumps(gateway_config(codec_processes=1)), encoding="utf-8")
        read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bottega.gateway", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            env={**os.environ, "BOTTEGA_STATE": str(folder / "state")},
        )
        os.close(write_end)
        self.stderr = os.fdopen(read_end, "rb")
        line = json.loads(self.stderr.readline())
        assert line["event"] == "serving"
        self.address, self.fleet, self.metrics = line["address"], line["fleet"], line["metrics"]

    def dropped(self) -> int:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=ANSWER_S) as answer:
            found = re.search(r"^bottega_log_lines_dropped_total ([0-9.]+)$", answer.read().decode(), re.MULTILINE)
        assert found
        return int(float(found[1]))


async def _say_much(address: str, jobs: range) -> None:
    """Makes the gateway log two lines for each job; every call is answered."""
    async with open_channel(address) as channel:
        images = image_pb2_grpc.ImageServiceStub(channel)

        async def turn(number: int) -> None:
            order = image_pb2.SubmitJobRequest(request_id=f"{number:-<120}", spec=GenerationSpec(prompt="a star"))
            job = (await images.SubmitJob(order, timeout=ANSWER_S)).job
            await images.CancelJob(image_pb2.CancelJobRequest(job_id=job.job_id), timeout=ANSWER_S)

        for first in range(0, len(jobs), 30):
            await asyncio.gather(*map(turn, jobs[first : first + 30]))


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Unread]:
    unread = Unread(tmp_path)
    try:
        worker = await ScriptedWorker("w1", unread.fleet).start()
        worker.script.hold_at = 1
        await _say_much(unread.address, range(JOBS))
        yield unread
        await worker.die()
    finally:
        unread.process.kill()
        unread.process.wait(10)
        unread.stderr.close()


def _lines(gateway: Unread, dropped: int) -> list[dict[str, Any]]:
    """Until as many lines as that are said to have been dropped: by one line, or several where a short one fitted."""
    lines: list[dict[str, Any]] = []
    while dropped > 0:
        lines.append(json.loads(gateway.stderr.readline()))
        if lines[-1]["event"] == "log lines were dropped, because stderr was not read fast enough":
            dropped -= lines[-1]["lines"]
    return lines


async def test_a_gateway_whose_log_nobody_reads_goes_on_and_ends_when_told(gateway: Unread) -> None:
    dropped = await asyncio.to_thread(gateway.dropped)
    assert 0 < dropped < 2 * JOBS
    lines = await asyncio.to_thread(_lines, gateway, dropped)
    assert (lines[-1]["level"], lines[-1]["service"]) == ("WARNING", "gateway")
    assert {"job accepted", "job cancelled"} <= {line["event"] for line in lines}
    await _say_much(gateway.address, range(JOBS, JOBS + 60))  # more than the pipe has room for
    gateway.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(gateway.process.wait, EVENTUALLY_S) == 0


def _ended_unread(code: str, *, read_after_s: float) -> tuple[int, bytes]:
    """Status and stderr of a program whose stderr is a pipe of one page that is read late."""
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    with subprocess.Popen([sys.executable, "-c", code], stderr=write_end) as process, os.fdopen(read_end, "rb") as said:
        os.close(write_end)
        time.sleep(read_after_s)
        text = said.read()
        return process.wait(10), text


def test_an_engine_that_ends_at_once_leaves_its_last_lines() -> None:
    """As engines do, without Python's help."""
    code = (
        "import logging, os; from bottega.rpc.operation import logs; logs.configure('engine', 'info')\n"
        "for n in range(200): logging.info('line %d', n, extra={'text': 'x' * 100})\n"
        "logs.flush(); os._exit(7)"
    )
    status, text = _ended_unread(code, read_after_s=0.6)
    assert status == 7
    assert [json.loads(line)["event"] for line in text.splitlines()] == [f"line {n}" for n in range(200)]


def test_a_crash_leaves_all_of_its_traceback() -> None:
    code = (
        "from bottega.rpc.operation import logs; logs.configure('engine', 'info')\n"
        "def deep(n):\n    if n == 0:\n        raise KeyError('a\\nb')\n    deep(n - 1) if n % 2 else deep(n - 1)\n"
        "deep(400)"
    )
    status, text = _ended_unread(code, read_after_s=0.6)
    assert status == 1
    (line,) = [json.loads(each) for each in text.splitlines()]
    assert (line["level"], line["event"]) == ("CRITICAL", "the process ends with an unexpected error")
    assert line["exc_info"].endswith(r"KeyError: 'a\nb'")


def test_what_writes_to_stderr_by_itself_does_not_wait_either() -> None:
    """C libraries and child processes have the descriptor, and no queue."""
    code = (
        "import os, subprocess, warnings; from bottega.rpc.operation import logs; logs.configure('engine', 'info')\n"
        "subprocess.run(['/bin/sh', '-c', 'head -c 300000 /dev/zero >&2'], timeout=20)\n"
        "warnings.warn('one of a library')\n"
        "os.write(1, b'done')"
    )
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write_end, timeout=30, check=False
        )
    finally:
        os.close(read_end)
        os.close(write_end)
    assert (ended.returncode, ended.stdout) == (0, b"done")
