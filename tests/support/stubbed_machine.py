"""A folder root for deploy/install.sh where a release takes no time: pip and systemd are scripts that write down what
they are asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_LONG_S = 60.0

# Makes an environment of itself, in which pip installs nothing and each command succeeds.
_PYTHON = """#!/bin/sh
case "$1 ${2:-}" in
"-m venv")
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/bin/sh\\n' >"$3/bin/bottega"
    chmod 755 "$3/bin/bottega"
    ;;
"-m pip")
    shift 2
    echo "$*" >>"$STUBS/pip.asked"
    case "$*" in *unknown*) exit 1 ;; esac
    ;;
esac
"""

# Units and their states are lines of units.txt; those that fail to start, of failing.txt.
_SYSTEMCTL = f"""#!{sys.executable}
import fnmatch, os, pathlib, sys

stubs = pathlib.Path(os.environ["STUBS"])
verb, *rest = (word for word in sys.argv[1:] if word not in ("--full", "--plain", "--no-legend", "--quiet"))
units = dict(line.split() for line in (stubs / "units.txt").read_text().splitlines())
if verb == "list-units":
    states = [word.removeprefix("--state=").split(",") for word in rest if word.startswith("--state=")]
    patterns = [word for word in rest if not word.startswith("--")]
    for unit, state in units.items():
        listed = state in states[0] if states else state != "inactive"
        if listed and any(fnmatch.fnmatch(unit, pattern) for pattern in patterns):
            print(unit, "loaded", state, state, "what it is for")
elif verb == "is-active":
    sys.exit(0 if units.get(rest[0]) == "active" else 3)
else:
    with (stubs / "systemctl.asked").open("a") as file:
        print(verb, *rest, file=file)
    ends = {{"stop": "active", "reset-failed": "failed"}}.get(verb)
    if ends and units.get(rest[0]) == ends:
        units[rest[0]] = "inactive"
    (stubs / "units.txt").write_text("".join(f"{{unit}} {{state}}\\n" for unit, state in units.items()))
    if verb == "restart" and rest[0] in (stubs / "failing.txt").read_text().split():
        sys.exit("Job for it failed.")
"""


class StubbedMachine:
    """`root` is what is installed to, from `checkout`. online: `systemctl` is asked, as where systemd runs."""

    def __init__(self, folder: Path) -> None:
        self.root, self.checkout, self.stubs = folder / "root", folder / "checkout", folder / "stubs"
        self.online = False
        self.path = os.pathsep.join([str(self.stubs), os.environ["PATH"]])
        self.stubs.mkdir()
        for name in ("units.txt", "failing.txt", "systemctl.asked", "pip.asked"):
            (self.stubs / name).touch()
        for name, text in (("python", _PYTHON), ("systemctl", _SYSTEMCTL)):
            (self.stubs / name).write_text(text)
            (self.stubs / name).chmod(0o755)
        shutil.copytree(DEPLOY, self.checkout / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("protos", "libs", "services", "kernels"):
            (self.checkout / part).mkdir()
        (self.checkout / "services/pyproject.toml").write_text('version = "1.0"\n')
        (self.checkout / "constraints.txt").touch()

    @property
    def home(self) -> Path:
        return self.root / "opt/bottega"

    @property
    def units(self) -> Path:
        return self.root / "etc/systemd/system"

    @property
    def current(self) -> str:
        return (self.home / "current").readlink().name

    @property
    def releases(self) -> set[str]:
        return {path.name for path in (self.home / "releases").iterdir()}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / "deploy/install.sh", *command, "--root", self.root],
            env={"PATH": self.path, "STUBS": str(self.stubs), **({"BOTTEGA_TEST_SYSTEMD": "1"} if self.online else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LONG_S,
            check=False,
            umask=0o077,
        )

    def install(self, *options: str) -> str:
        done = self.run("install", "--python", str(self.stubs / "python"), *options)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def change_checkout(self, line: str) -> None:
        """So that it is another release."""
        with (self.checkout / "services/source.py").open("a") as file:
            file.write(f"{line}\n")

    def set_units(self, **states: str) -> None:
        """States by the names of units without `bottega-` and `.service`; `_at_` stands for `@`."""
        lines = [f"bottega-{name.replace('_at_', '@')}.service {state}\n" for name, state in states.items()]
        (self.stubs / "units.txt").write_text("".join(lines))

    def asked(self, verb: str) -> list[str]:
        """The units that systemd was asked to do this with, in order, since the last time."""
        path = self.stubs / "systemctl.asked"
        lines = [line.split() for line in path.read_text().splitlines()]
        path.write_text("")
        return [line[1] for line in lines if line[0] == verb]
