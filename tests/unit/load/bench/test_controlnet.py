"""Who runs where in the bench of a ControlNet server: worker and server must have a core each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from load.bench.controlnet_suite import check_apart, pinned
from tests.support.services import Service

CORES = os.sched_getaffinity(0)


@contextmanager
def _asleep() -> Iterator[Service]:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield Service(name="s", process=process, address="", metrics="", log=Path())
        assert process.stdin
        process.stdin.close()


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_worker_and_server_have_a_core_each_and_the_bench_says_where_they_have_not() -> None:
    with ExitStack() as stack:
        services = []
        for core in (0, 1, 1):
            with pinned(core):
                services.append(stack.enter_context(_asleep()))
        worker, server, beside = services
        check_apart(worker, server)
        with pytest.raises(SystemExit, match="need a core each"):
            check_apart(server, beside)
    assert os.sched_getaffinity(0) == CORES
