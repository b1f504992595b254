"""What an installed gateway brings along: never torch. Asks pip and Python in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.timeout(240)
def test_installing_the_gateway_brings_grpc_and_no_torch(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    command += ["--dry-run", "--ignore-installed", "--report", str(report), "-c", "constraints.txt"]
    command += ["./protos", "./libs", "./services[gateway]"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 0, done.stderr
    installed = {_normalised(item["metadata"]["name"]) for item in json.loads(report.read_text())["install"]}
    assert {"bottega-services", "grpcio", "grpcio-health-checking", "prometheus-client"} <= installed
    assert not installed & HEAVY


def test_every_light_module_imports_where_torch_cannot() -> None:
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps(sorted(HEAVY)), json.dumps(LIGHT_PACKAGES)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {"bottega.gateway.__main__", "bottega.client.cli"} <= set(seen["imported"])
    assert seen["heavy"] == []
