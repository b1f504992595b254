"""Another user of this machine, for tests of what is nobody else's: processes that are not root's.

Only root can make them; elsewhere such tests are skipped.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
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


def command_of_another(command: Sequence[str | Path], *, group: int, stash: Path) -> list[str]:
    """Return the command line by which another user runs a command of this environment, with one group.

    It runs in a mount namespace in which the interpreter and the packages are open to that user, wherever they are: a
    home that is closed to others is covered there, but for what this environment has in it.

    Args:
        command: What is run.
        group: The only group of that user.
        stash: Empty folder for mounts.
    """
    needed = {Path(sys.executable).resolve(), Path(sys.prefix).resolve(), Path(__file__).resolve()}
    script = ["set -e"]
    for number, (closed, kept) in enumerate(_closed_and_kept(needed).items()):
        places = [stash / f"{number}-{index}" for index in range(len(kept))]
        for place, path in zip(places, kept, strict=True):
            script += [f"mkdir {place}", f"mount --bind {path} {place}"]
        script.append(f"mount -t tmpfs -o mode=755 tmpfs {closed}")
        for place, path in zip(places, kept, strict=True):
            script += [f"mkdir {path}", f"mount --bind {place} {path}"]
    script.append(f'exec setpriv --reuid {USER} --regid {group} --clear-groups "$@"')
    return ["unshare", "--mount", "sh", "-c", "\n".join(script), "sh", *map(str, command)]


def _closed_and_kept(needed: set[Path]) -> dict[Path, list[Path]]:
    """Return the outermost folders above these paths that others may not enter, and what is needed of each."""
    found: dict[Path, set[Path]] = {}
    for path in needed:
        above = [*reversed(path.parents)]
        for folder, below in zip(above, [*above[1:], path], strict=True):
            if not folder.stat().st_mode & stat.S_IXOTH:
                found.setdefault(folder, set()).add(below)
                break
    return {closed: sorted(kept) for closed, kept in found.items()}
