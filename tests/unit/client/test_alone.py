"""The command where parts of Bottega are not installed: it says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
        (_SERVICES, ["config", "show", "worker"], "needs bottega-services"),
        ("click", ["models"], "click is not installed: pip install 'bottega-libs[client]'"),
        ("bottega.v1", ["models"], "pip install bottega-protos"),
    ],
    ids=["up", "config", "extra", "protos"],
)
def test_what_is_not_installed_is_named_with_what_installs_it(hidden: str, command: list[str], said: str) -> None:
    words = [sys.executable, "-c", _SCRIPT, hidden, *command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_runs_without_the_services() -> None:
    words = [sys.executable, "-c", _SCRIPT, _SERVICES, "doctor"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "manifest" not in done.stdout
    assert "Traceback" not in done.stderr


def test_a_command_that_draws_loads_nothing_that_only_a_suite_needs() -> None:
    script = "import sys, bottega.client.cli.generate; print({'yaml', 'pydantic', 'rich', 'PIL'} & sys.modules.keys())"
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "set()\n", done.stderr
