"""A child that opens untrusted files has nothing of its parent's environment, no network, and starts no programs.

Where the kernel refuses one of these, the child works all the same, and the log says it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bottega.process import limited_process, sandbox
from bottega.process.child import ChildProcess

PROBE = """
import argparse, ctypes, json, os, socket, subprocess, sys, threading
from bottega.process.child import FramedPipe

def connect(port):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        return sock.recv(3).decode()

def run():
    return subprocess.run(["/bin/true"], check=True).returncode

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def write(path):
    with open(path, "w") as file:
        return file.write("x")

def overwrite(path):
    with open(path, "r+b") as file:
        return file.write(b"x")

def read(path):
    with open(path) as file:
        return file.read()

def thread():
    said = []
    thread = threading.Thread(target=lambda: said.append(sum(range(1000))))
    thread.start()
    thread.join()
    return said

def socket_of_thread():
    said = []
    def make():
        try:
            said.append(socket.socket().close())
        except OSError as error:
            said.append(error.errno)
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return said

def kill(pid):
    return os.kill(pid, 0)

def environment():
    return dict(os.environ)

def new_import():
    import decimal, xml.dom.minidom
    return str(decimal.Decimal(1))

parser = argparse.ArgumentParser()
parser.add_argument("--fd", type=int)
channel = FramedPipe.from_fd(parser.parse_args().fd)
channel.send(b"ready")
while (frame := channel.recv()) is not None:
    name, *arguments = json.loads(frame)
    try:
        answer = globals()[name](*arguments)
    except OSError as error:
        answer = {"error": error.strerror}
    channel.send(json.dumps(answer).encode())
"""
REFUSED = {"error": os.strerror(1)}
SECRET = "BOTTEGA_TEST_SECRET"

# A parent whose kernel refuses namespaces and filters, as in many containers; it draws and imports all the same.
REFUSING = """
import asyncio, errno, io, json, logging, pathlib, sys
import pyseccomp
from PIL import Image
from bottega.codec.pool import CodecPool
from bottega.process import limited_process

refusal = pyseccomp.ERRNO(errno.EPERM)
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
rules.add_rule(refusal, "unshare")
rules.add_rule(refusal, "seccomp")
rules.add_rule(refusal, "prctl", pyseccomp.Arg(0, pyseccomp.EQ, 22))  # PR_SET_SECCOMP
rules.load()

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append((record.levelname, record.getMessage()))

logging.getLogger("bottega").addHandler(Lines())
logging.getLogger("bottega").setLevel(logging.INFO)

async def main():
    image = io.BytesIO()
    Image.new("RGB", (30, 20), "teal").save(image, "PNG")
    pool = CodecPool(processes=2)
    await pool.start()
    found = limited_process.sandbox_status(pool.pids[0])
    size = await pool.inspect(image.getvalue())
    await pool.stop()
    print(json.dumps([found.no_network, found.filtered, found.no_new_privileges, size.width, lines]))

asyncio.run(main())
"""

needs_library = pytest.mark.skipif(sandbox._library() is None, reason="neither seccomp nor pyseccomp is here")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "probe_child.py").write_text(PROBE)
    monkeypatch.setenv(SECRET, "a token")
    return str(tmp_path)


@contextlib.asynccontextmanager
async def probe(path: str, **settings: Any) -> AsyncIterator[ChildProcess]:
    child = await ChildProcess.start("probe_child", env={"PYTHONPATH": path}, **settings)
    try:
        assert await asyncio.wait_for(child.channel.recv(), 20) == b"ready"
        yield child
    finally:
        assert await child.stop(5) == 0


async def ask(child: ChildProcess, *what: object) -> object:
    await asyncio.wait_for(child.channel.send(json.dumps(what).encode()), 5)
    answer = await asyncio.wait_for(child.channel.recv(), 20)
    assert answer is not None, "the probe died"
    said: object = json.loads(answer)
    return said


async def test_a_confined_child_has_nothing_of_its_parents_environment(path: str) -> None:
    async with probe(path) as child:
        said = await ask(child, "environment")
        assert isinstance(said, dict)
        assert said[SECRET] == "a token"
    async with probe(path, confined="reads") as child:
        said = await ask(child, "environment")
        assert isinstance(said, dict)
        assert said.keys() - {"LC_CTYPE"} == {"PYTHONPATH"}, "LC_CTYPE is Python's own"
        assert said["PYTHONPATH"] == path
        with (Path("/proc") / str(child.pid) / "environ").open("rb") as environment:
            assert SECRET.encode() not in environment.read()


async def test_a_confined_child_cannot_reach_a_listener_of_its_machine(path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        accepting = asyncio.create_task(asyncio.to_thread(_greet, listener))
        async with probe(path) as child:
            assert await ask(child, "connect", port) == "hi!"
        await accepting
        async with probe(path, confined="reads") as child:
            assert await ask(child, "connect", port) in (REFUSED, {"error": os.strerror(101)})
            known = limited_process.sandbox_status(child.pid)
            assert known is not None
            assert known.no_network or known.filtered
            assert known.no_new_privileges


@needs_library
async def test_a_confined_child_makes_no_sockets_programs_processes_or_files(path: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("kept")
    async with probe(path) as child:
        for call in (("run",), ("fork",), ("write", str(tmp_path / "new")), ("kill", os.getpid())):
            assert not isinstance(await ask(child, *call), dict), "the probe can do it where nothing confines it"
    async with probe(path, confined="reads") as child:
        assert limited_process.sandbox_status(child.pid) == limited_process.SandboxStatus(
            no_network=True, filtered=True, no_new_privileges=True
        )
        assert await ask(child, "socket_of_thread") == [1]
        refused = (
            ("run",),
            ("fork",),
            ("kill", os.getpid()),
            ("write", str(tmp_path / "other")),
            ("overwrite", str(there)),
            ("write", str(there)),
        )
        for call in refused:
            assert await ask(child, *call) == REFUSED, call
        assert await ask(child, "read", str(there)) == "kept"
        assert await ask(child, "thread") == [499500]
        assert await ask(child, "new_import") == "1"
    async with probe(path, confined="writes") as child:
        assert await ask(child, "run") == REFUSED
        assert await ask(child, "overwrite", str(there)) == 1
    assert there.read_text() == "xept"


async def test_what_is_missing_is_told_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with probe(path) as child:  # one that nothing confines
        limited_process.log_missing_restrictions(child.pid)
        limited_process.log_missing_restrictions(child.pid)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    for part in ("a network of its own", "a system-call filter", "no new privileges"):
        assert part in caplog.text
    limited_process.log_missing_restrictions(child.pid)  # which is gone
    assert limited_process.sandbox_status(child.pid) is None


@needs_library
def test_where_the_kernel_refuses_images_are_decoded_all_the_same_and_the_log_says_it_once() -> None:
    done = subprocess.run([sys.executable, "-c", REFUSING], capture_output=True, text=True, timeout=60, check=True)
    network, filtered, no_new_privileges, width, lines = json.loads(done.stdout)
    assert (network, filtered, no_new_privileges, width) == (False, False, True, 30)
    ((level, line),) = lines
    assert level == "INFO"
    assert "lack a network of its own and a system-call filter" in line


def _greet(listener: socket.socket) -> None:
    listener.settimeout(20)
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"hi!")
