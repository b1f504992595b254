"""load/ghz/run.sh: what it gives to ghz, and that it ends as the gate does. ghz and bottega are stand-ins here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ghz_configurations import GHZ, configurations

# Makes a report of the shape in tests/samples from the configuration that it is given, and notes what that was.
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, sys
sys.path.insert(0, {str(GHZ.parents[1])!r})
from tests.samples.ghz_reports import ghz_report
given = dict(zip(sys.argv[1:-1:2], sys.argv[2:-1:2]))
config = json.loads(pathlib.Path(given["--config"]).read_text())
with open(os.environ["NOTED"], "a") as noted:
    print(json.dumps([config, given["--format"], sys.argv[-1]]), file=noted)
method = config["call"].rpartition("/")[2]
report = ghz_report(method, config["tags"]["profile"], count=config["total"])
if method == os.environ.get("FAILING"):
    report["statusCodeDistribution"] = {{"Unavailable": config["total"]}}
pathlib.Path(given["--output"]).write_text(json.dumps(report))
"""
BOTTEGA = """#!/bin/sh
case "$1" in generate) echo job-7;; jobs) [ "$3" = job-7 ];; esac
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, text in (("ghz", STAND_IN), ("bottega", BOTTEGA)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(commands: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """How it ends, with these commands before what every machine has."""
    given = {
        "PATH": f"{commands}:/usr/bin:/bin",
        "NOTED": str(commands / "noted"),
        "TMPDIR": str(commands),
        **environment,
    }
    return subprocess.run(
        [str(GHZ / "run.sh"), *arguments],
        env={**{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}, **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_configuration_goes_to_ghz_with_a_job_that_there_is(commands: Path, tmp_path: Path) -> None:
    done = run(commands, "smoke", "127.0.0.1:7", str(tmp_path / "reports"))
    assert done.returncode == 0, done.stdout + done.stderr
    noted = [json.loads(line) for line in (commands / "noted").read_text().splitlines()]
    wanted = configurations("smoke", job_id="job-7")
    assert {config["call"].rpartition("/")[2]: config for config, _, _ in noted} == wanted
    assert {(form, address) for _, form, address in noted} == {("json", "127.0.0.1:7")}
    assert json.loads(done.stdout.splitlines()[-1]) == {"gate": "pass", "profile": "smoke", "reports": len(wanted)}
    assert len(list((tmp_path / "reports").iterdir())) == len(wanted)
    assert not list(commands.glob("bottega-ghz-*"))


def test_it_ends_as_the_gate_does(commands: Path, tmp_path: Path) -> None:
    done = run(commands, "smoke", "127.0.0.1:7", str(tmp_path / "reports"), FAILING="GetJob")
    assert done.returncode == 1
    assert '"gate": "fail"' in done.stdout
