"""What an installed gateway brings along: never torch. Asks what is installed, and Python in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"accelerate", "diffusers", "numpy", "peft", "safetensors", "torch", "transformers"}
LIGHT_PACKAGES = ("client", "codec", "gateway", "miniature.scenes", "planning", "process", "rpc", "storage", "v1")

# Blocks the heavy packages, imports every module of the light ones, and prints what it imported.
IMPORT_ALL = """
import importlib, json, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"{name} is blocked here")

HEAVY = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Blocked())
names = ["bottega.config", "bottega.errors", "bottega.rules"]
for package in json.loads(sys.argv[2]):
    module = importlib.import_module("bottega." + package)
    names.append(module.__name__)
    names += [found.name for found in pkgutil.walk_packages(module.__path__, module.__name__ + ".")]
names.remove("bottega.client.cli.__main__")  # it is the command: importing it runs it
for name in names:
    importlib.import_module(name)
print(json.dumps({"imported": names, "heavy": sorted(HEAVY & set(sys.modules))}))
"""


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-")


def _brought_along(name: str, extras: frozenset[str]) -> set[str]:
    """All distributions that an installed one requires with these extras, and what those require."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, extras)]
    while waiting:
        wanted, extras = waiting.pop()
        if (_normalised(wanted), extras) in found:
            continue
        found.add((_normalised(wanted), extras))
        for text in metadata.requires(wanted) or ():
            required = Requirement(text)
            if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                waiting.append((required.name, frozenset(required.extras)))
    return {distribution for distribution, _ in found}


def test_installing_the_gateway_brings_grpc_and_no_torch() -> None:
    installed = _brought_along("bottega-services", frozenset({"gateway"}))

    assert {"bottega-services", "grpcio", "grpcio-health-checking", "prometheus-client"} <= installed
    assert not installed & HEAVY
    assert "torch" in _brought_along("bottega-services", frozenset({"worker"})), "else nothing would be found at all"


def test_every_light_module_imports_where_torch_cannot() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps(sorted(HEAVY)), json.dumps(LIGHT_PACKAGES)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {"bottega.gateway.__main__", "bottega.client.cli"} <= set(seen["imported"])
    assert seen["heavy"] == []
