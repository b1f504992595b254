"""Within one process, a sender's own buffers are looked at where they lie."""

from __future__ import annotations

from pathlib import Path

from bottega.transport import Backend
from tests.support.transport_backends import LAYOUT, content, linked, patience


def test_nothing_is_copied_within_a_process(tmp_path: Path) -> None:
    buffers = [bytearray(part) for part in content(LAYOUT, 1)]
    with linked(Backend.PROCESS, tmp_path) as (near, far):
        near.send(LAYOUT, buffers, patience())
        with far.recv(patience(), LAYOUT) as incoming:
            incoming.wait_all(patience())
            assert all(incoming.view(index).obj is buffer for index, buffer in enumerate(buffers))
