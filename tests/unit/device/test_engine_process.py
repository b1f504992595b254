"""What holds in the process of every engine: lean imports, one team of threads, bits that no address changes."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from bottega.controlnet import engine_client as controlnet_engine_front
from bottega.device.engine_start import UNUSED, StartReporter
from bottega.plain_text import progress_text
from bottega.process.engine_supervisor import engine_environment
from bottega.worker import engine_client as worker_engine_front

_TIMEOUT_S = 120.0
_PRODUCTS = (1, 2, 3, 4, 24)
_IMPORTS = """
import gc, json, os, sys, threading
from bottega.device.engine_start import lean_imports

found = {}
before = len(gc.get_objects())
with lean_imports():
    from diffusers.utils import torch_utils
found["looks for garbage"] = gc.isenabled()
found["objects to look at are fewer"] = len(gc.get_objects()) < before
found["triton"] = sys.modules["triton"]
found["dynamo"] = "torch._dynamo" in sys.modules
"""
# How many threads are beside those that Python began, more than before.
_THREADS = """
import torch
from torch import nn
from bottega.model_files.family_names import UNET
from bottega.addons.loras.engine.patching import Patcher
from bottega.device.devices import compute_with
from bottega.model.rows import Factors, LoraSet

def native_threads():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def compute():
    large = torch.randn(1200, 1200)
    torch.nn.functional.silu(large) + large @ large

compute_with(2)
compute()
before = native_threads()
done, seen = threading.Event(), threading.Event()

def load():
    compute()
    seen.set()
    done.wait(60)

thread = threading.Thread(target=load)
thread.start()
seen.wait(60)
found["threads of a thread that loads"] = native_threads() - before
done.set()
thread.join()

# Each so small that torch copies it without asking for its number of threads; MKL shares out its product.
net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(96)))
factors = {str(place): Factors(down=torch.randn(16, 128), up=torch.randn(128, 16)) for place in range(len(net))}
patcher = Patcher(net, UNET)
patcher.patch(LoraSet(key=(), components={UNET: factors}))
patcher.put_back()
found["threads of patching"] = native_threads() - before
found["threads"] = torch.get_num_threads()
"""
# The number of results of each product, over all addresses of weights and inputs modulo 64 bytes.
_BITS = """
def at(offset, tensor):
    memory = torch.empty(tensor.nbytes + 64, dtype=torch.uint8)
    begin = (offset - memory.data_ptr()) % 64
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

def results(rows, features):
    inputs, weight = torch.randn(rows, features), torch.randn(96, features)
    offsets = range(0, 64, 4)
    made = [torch.nn.functional.linear(at(0, inputs), at(offset, weight)) for offset in offsets]
    made += [torch.nn.functional.linear(at(offset, inputs), at(0, weight)) for offset in offsets]
    return len({result.numpy().tobytes() for result in made})

found["results"] = [results(rows, 200) for rows in ROWS]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What is so in a process with the environment of an engine, without a GPU."""
    assert importlib.util.find_spec("triton"), "nothing to see here without it"
    environment = {name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", "MKL_CBWR"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MKL_CBWR", raising=False)
        environment |= engine_environment(exclusive_cores=False)
    ran = subprocess.run(
        [sys.executable, "-c", f"ROWS = {_PRODUCTS}\n{_IMPORTS}{_THREADS}{_BITS}"],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    facts: dict[str, Any] = json.loads(ran.stdout)
    return facts


def test_what_was_imported_is_not_looked_at_again(found: dict[str, Any]) -> None:
    assert found["looks for garbage"]
    assert found["objects to look at are fewer"]


def test_without_a_cuda_device_diffusers_does_not_bring_triton(found: dict[str, Any]) -> None:
    assert (found["triton"], found["dynamo"]) == (None, True)


def test_only_the_thread_that_computes_has_a_team(found: dict[str, Any]) -> None:
    assert (found["threads of a thread that loads"], found["threads of patching"], found["threads"]) == (0, 0, 2)


def test_the_last_bits_of_a_product_do_not_depend_on_addresses(found: dict[str, Any]) -> None:
    assert found["results"] == [1] * len(_PRODUCTS)


def test_an_operator_s_own_choice_of_kernels_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert engine_environment(exclusive_cores=False)["MKL_CBWR"] == "COMPATIBLE"


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
