"""Another user of this machine, for tests of what is nobody else's: processes that are not root's.

Only root can make them; elsewhere such tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Nobody's, on any machine: no account has to exist.
USER = 54_321
GROUP = 54_322

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# What it needs is imported before it is another user, who may not be able to read where it is installed.
_BECOME = """
import os, sys
{imports}
os.setgroups([])
os.setgid({group})
os.setuid({user})
{code}
"""


def run_as_another(code: str, *arguments: str | Path, imports: str = "", group: int = GROUP) -> str:
    """What a Python program of another user prints, errors included. It must end by itself within 30 s."""
    program = _BECOME.format(imports=imports, code=code, user=USER, group=group)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout.strip()
