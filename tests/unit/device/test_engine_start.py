"""Engine processes do not import PEFT and SciPy, installed as they are here, nor look for garbage while they import."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from bottega.controlnet import engine_client as controlnet_engine_front
from bottega.device.engine_start import UNUSED, StartReporter
from bottega.plain_text import progress_text
from bottega.worker import engine_client as worker_engine_front

# Runs a module up to where it first imports Diffusers or what that brings, and says how things stand there.
LOOK = """
import gc, importlib.util, os, runpy, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name in {"accelerate", "diffusers", "torch", "transformers"}:
            print(importlib.util.find_spec("peft"), importlib.util.find_spec("scipy"), gc.isenabled(), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Look())
sys.argv = ["engine", "--fd", FD, "--config-json", "{}"]
runpy.run_module(MODULE, run_name="__main__")
"""


@pytest.mark.parametrize("module", [worker_engine_front.ENGINE_MODULE, controlnet_engine_front.ENGINE_MODULE])
def test_an_engine_process_finds_neither_peft_nor_scipy_and_looks_for_no_garbage_when_it_imports_diffusers(
    module: str,
) -> None:
    assert all(map(importlib.util.find_spec, UNUSED)), "nothing to see here without them"
    ours, its = socket.socketpair()  # an engine says there how far its start is
    with ours, its:
        code = f"MODULE, FD = {module!r}, '{its.fileno()}'\n{LOOK}"
        looked = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            pass_fds=(its.fileno(),),
        )

    assert (looked.stdout, looked.returncode) == ("None None False\n", 0), looked.stderr


def test_what_was_imported_is_not_looked_at_again() -> None:
    code = """
import gc
from bottega.device.engine_start import lean_imports
before = len(gc.get_objects())
with lean_imports():
    import asyncio
print(gc.isenabled(), len(gc.get_objects()) < before)
"""
    looked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert looked.stdout == "True True\n", looked.stderr


def test_without_a_cuda_device_diffusers_does_not_bring_triton() -> None:
    assert importlib.util.find_spec("triton"), "nothing to see here without it"
    code = """
import sys
from bottega.device.engine_start import lean_imports
with lean_imports():
    from diffusers.utils import torch_utils
print(sys.modules["triton"], "torch._dynamo" in sys.modules)
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    looked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )

    assert looked.stdout == "None True\n", looked.stderr


def test_a_stage_is_reported_as_it_begins_and_at_most_twice_a_second() -> None:
    sent: list[tuple[str, int, int]] = []
    now_s = 100.0
    reporter = StartReporter(lambda *progress: sent.append(progress), clock=lambda: now_s)
    reporter.begin("loading unet", 1000)
    for _ in range(10):
        now_s += 0.25
        reporter.advance(100)
    reporter.begin("warming up")
    reporter.advance()
    assert sent == [
        ("loading unet", 0, 1000),
        *(("loading unet", done, 1000) for done in range(200, 1001, 200)),
        ("warming up", 0, 0),
    ]


def test_progress_is_said_in_the_unit_of_the_whole() -> None:
    assert progress_text("loading unet", 3_100_000_000, 5_140_000_000) == "loading unet, 3.1 of 5.1 GB"
    assert progress_text("loading vae", 5_000_000, 167_000_000) == "loading vae, 5.0 of 167.0 MB"
    assert progress_text("hashing", 12, 10) == "hashing, 0.0 of 0.0 MB"
    assert progress_text("warming up", 0, 0) == "warming up"
