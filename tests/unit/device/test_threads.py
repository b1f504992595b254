"""Beside the thread that computes, those of an engine's process share nothing out: there is one team of libgomp."""

from __future__ import annotations

import json
import os
import subprocess
import sys

_TIMEOUT_S = 120.0
# In a process of its own: how many threads are beside those that Python began, more than before.
_BEGIN = """
import json, os, threading, torch
from torch import nn
from bottega.device.devices import compute_with
from bottega.addons.loras.engine.lora import UNET
from bottega.addons.loras.engine.patching import Patcher
from bottega.model.rows import Factors, LoraSet

def native_threads():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def compute():
    large = torch.randn(1200, 1200)
    torch.nn.functional.silu(large) + large @ large

compute_with(2)
compute()
before = native_threads()
"""
_LOADS = """
done, seen = threading.Event(), threading.Event()

def load():
    compute()
    seen.set()
    done.wait(60)

thread = threading.Thread(target=load)
thread.start()
seen.wait(60)
loading = native_threads() - before
done.set()
thread.join()
"""
_PATCHES = """
# Each so small that torch copies it without asking for its number of threads; MKL shares out its product.
net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(96)))
factors = {str(place): Factors(down=torch.randn(16, 128), up=torch.randn(128, 16)) for place in range(len(net))}
patcher = Patcher(net, UNET)
patcher.patch(LoraSet(key=(), components={UNET: factors}))
patcher.put_back()
patching = native_threads() - before
print(json.dumps({"loading": loading, "patching": patching, "threads": torch.get_num_threads()}))
"""


def test_only_the_thread_that_computes_has_a_team() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ran = subprocess.run(
        [sys.executable, "-c", _BEGIN + _LOADS + _PATCHES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"loading": 0, "patching": 0, "threads": 2}
