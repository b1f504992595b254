"""The count of open files that tells whether the connections of a port are looked at."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from bottega.rpc import inbound_connections
from bottega.rpc.inbound_connections import open_file_count


def test_open_files_and_sockets_are_counted() -> None:
    before = open_file_count()
    with contextlib.ExitStack() as opened:
        for _ in range(40):
            opened.enter_context(Path(os.devnull).open("rb"))
        assert open_file_count() == before + 40


def test_they_are_counted_one_by_one_where_the_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    class UntoldFiles(type(Path())):  # type: ignore[misc]
        """A folder whose size the kernel gives as 0, as before Linux 6.2."""

        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            fields = list(super().stat(follow_symlinks=follow_symlinks))
            return os.stat_result([*fields[:6], 0, *fields[7:]])

    monkeypatch.setattr(inbound_connections, "_OPEN_FILES", UntoldFiles("/proc/self/fd"))
    test_open_files_and_sockets_are_counted()
