"""The command where parts of Bottega are not installed: it says what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).resolve().parents[3]

# Hides packages from a process, as if nobody had installed them.
_SCRIPT = """
import sys

HIDDEN = sys.argv[1].split(",")

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{hidden}.") for hidden in HIDDEN):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
from bottega.command import main
sys.argv[:2] = ["bottega"]
main()
"""
_SERVICES = "bottega.gateway,bottega.worker,bottega.controlnet,bottega.loras,bottega.cache,bottega.activations"


@pytest.mark.parametrize(
    ("hidden", "command", "said"),
    [
        (_SERVICES, ["up"], "needs bottega-services, which is not installed: pip install 'bottega-services["),
        ("click", ["models"], "click is not installed: pip install 'bottega-libs[client]'"),
        ("bottega.v1", ["models"], "pip install bottega-protos"),
    ],
    ids=["up", "extra", "protos"],
)
def test_what_is_not_installed_is_named_with_what_installs_it(hidden: str, command: list[str], said: str) -> None:
    words = [sys.executable, "-c", _SCRIPT, hidden, *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_draws_loads_nothing_that_only_a_suite_needs() -> None:
    script = "import sys, bottega.client.cli.generate; print({'yaml', 'pydantic', 'rich', 'PIL'} & sys.modules.keys())"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "set()\n", done.stderr


# Has the wheel, the stubs and other people's packages on its path, and nothing of the checkout's libraries.
_FROM_WHEEL = """
import sys

sys.path[:0] = sys.argv[1].split(":")
import importlib
import importlib.util
import pkgutil

import bottega.addons
import bottega.client

names = [f"bottega.addons.{found.name}.client" for found in pkgutil.iter_modules(bottega.addons.__path__)]
assert len(names) == 4, names
for package in (bottega.client, *map(importlib.import_module, names)):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
heavy = [name for name in sys.modules if name.partition(".")[0] in ("torch", "diffusers", "transformers")]
assert not heavy, heavy
from bottega.command import main
sys.argv = ["bottega", "up"]
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SDK's wheel, built from a copy of the checkout, because builds leave files beside their sources."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "libs", folder / "libs", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "weights")
    )
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    words = [sys.executable, "-c", build, str(folder)]
    subprocess.run(words, cwd=folder / "libs", capture_output=True, timeout=120, check=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_nothing_that_only_services_need(wheel: Path) -> None:
    found = {Path(name).parts for name in zipfile.ZipFile(wheel).namelist()}
    spine = {parts[1] for parts in found} & {"device", "device_links", "engine", "model"}
    of_addons = {parts[2:4] for parts in found if parts[1] == "addons"}
    sides = {name for names in of_addons for name in names} & {"engine", "gateway", "interface", "worker"}
    assert (spine, sides) == (set(), set())
    assert wheel.stat().st_size < 1_000_000


def test_the_wheel_alone_runs_the_sdk_and_the_command(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    path = ":".join(map(str, (tmp_path, ROOT / "protos", Path(grpc.__file__).parents[1])))
    words = [sys.executable, "-I", "-S", "-c", _FROM_WHEEL, path]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "needs bottega-services, which is not installed" in done.stderr
