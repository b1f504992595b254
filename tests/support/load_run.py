"""A module of load/ as `make` runs it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from tests.support.warm_start.sitecustomize import COLD

_ROOT = Path(__file__).parents[2]


def run_load(module: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """The values of its last line. It may end with 1, as where a bar is missed, but with no other status."""
    said = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **COLD, "OMP_WAIT_POLICY": "PASSIVE", "TRANSFORMERS_VERBOSITY": "error"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert said.returncode in {0, 1}, said.stderr[-3000:]
    return cast("dict[str, Any]", json.loads(said.stdout.splitlines()[-1]))
