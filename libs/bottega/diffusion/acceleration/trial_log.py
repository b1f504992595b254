"""What the self-check was trying when its process ended: a crash of a driver leaves no other word, and an error that
the device does not recover from ends the process as well.

One file for all processes of one worker's engine, one after the other; the front makes it and removes it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

_log = logging.getLogger(__name__)


class TrialLog:
    """path: of the file; None keeps nothing. fatal: names during whose trial an earlier process has ended."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        said = _read(path)
        self.fatal = frozenset(said)
        self._write([*said])

    @classmethod
    def in_memory(cls) -> Self:
        """For one process."""
        return cls(None)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """While it is entered, the end of the process is that acceleration's fault; so is an error that leaves it."""
        self._write([*self.fatal, name])
        yield
        self._write([*self.fatal])

    def _write(self, names: list[str]) -> None:
        """So that it is there whatever ends the process; the machine's own end is none of an acceleration's.

        Where it cannot be written, as in a folder of temporary files that was tidied up, the engine starts anyhow.
        """
        if self._path is None:
            return
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(sorted(names)), encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            told = {"file": str(self._path), "why": error.strerror, "tried": names}
            _log.warning("an engine that ends in a trial will try the same again", extra=told)


def _read(path: Path | None) -> list[str]:
    """The names in it; none where it is not there, or not a list of names."""
    if path is None or not path.is_file():
        return []
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    return [name for name in said if isinstance(name, str)] if isinstance(said, list) else []
