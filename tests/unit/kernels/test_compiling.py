"""What an interpreter does not see: kernels as they are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_every_kernel_is_compiled_for_maps_of_one_element_too(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.kernel_compiling"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
