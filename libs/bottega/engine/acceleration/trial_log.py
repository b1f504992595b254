"""A file that names the acceleration that is being tried, so that a crash of the process can be blamed on it.

A crash in a driver leaves no other trace. The processes of a worker's engine use the file one after the other. The
worker's front process creates and removes it.
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
    """The log, in a file or only in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        earlier = _read(path)
        self.fatal = frozenset(earlier)
        """Names of accelerations during whose trial an earlier process died."""
        self._write([*earlier])

    @classmethod
    def in_memory(cls) -> Self:
        """Return a log that exists only in this process."""
        return cls(None)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Name the acceleration in the file during the block, and leave it there if the block raises or crashes."""
        self._write([*self.fatal, name])
        yield
        self._write([*self.fatal])

    def _write(self, names: list[str]) -> None:
        """Write the file so that it survives a crash of the process, not of the machine. Failures are only logged."""
        if self._path is None:
            return
        fresh = self._path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(sorted(names)), encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            facts = {"file": str(self._path), "why": error.strerror, "tried": names}
            _log.warning(
                "cannot write the trial log: if a trial ends the engine process, the next one will repeat it",
                extra=facts,
            )


def _read(path: Path | None) -> list[str]:
    """Return the names in the file; none if it is missing or malformed."""
    if path is None or not path.is_file():
        return []
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
