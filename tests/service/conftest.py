"""What tests of several services use: a folder that every user of the machine may look into."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """One that every user may look into: those that pytest makes are one user's alone."""
    made = Path(tempfile.mkdtemp(prefix="links-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)
