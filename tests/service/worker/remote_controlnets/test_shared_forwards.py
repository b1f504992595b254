"""In half precision, a server says which residuals it computed beside those of others, and computes some alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bottega.addons.controlnets.engine import LocalControlNets
from bottega.engine.job import EngineOrder
from tests.samples.controlnets import shelf_of
from tests.samples.small_model import small_model
from tests.support import linked_servers
from tests.support.controlled_engine import PLAIN, Desk, alone, controlled, on, until
from tests.support.linked_servers import linked_server
from tests.support.manual_engine import Drawing, load

JOIN_S = 30.0


@pytest.mark.parametrize("may_share", [True, False])
def test_a_picture_whose_residuals_were_computed_beside_anothers_is_not_exact_unless_it_computes_alone(
    folders: Mapping[str, Path], tmp_path: Path, may_share: bool
) -> None:
    # A model each: two threads may not use one tokenizer at once.
    half, beside = (load(small_model(), dtype=torch.bfloat16) for _ in range(2))
    with linked_server("half", folders, tmp_path, dtype=torch.bfloat16) as server, shelf_of(half, folders) as shelf:
        order = replace(on(controlled((0, 0.8), (0, 0.5)), server), shared_turns=may_share)
        other = on(controlled((0, 1.0), spec=replace(PLAIN, seed=2)), server)
        offers = linked_servers.Offers(server)
        drawings: list[Drawing] = []
        server.pause()
        threads = [
            threading.Thread(target=draw_into, args=(drawings, desk, each))
            for each, desk in ((order, Desk(half, offers)), (other, Desk(beside, offers)))
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(server.executor._waiting) == len(threads))
        server.computes.set()
        for thread in threads:
            thread.join(JOIN_S)
        mine = next(drawing for drawing in drawings if drawing.job is not None and drawing.job.order is order)
        assert mine.record.provenance.mean_group_requests == 1
        assert mine.record.shared_in_half_precision == may_share
        if not may_share:
            assert torch.equal(mine.latents[0], alone(half, LocalControlNets(shelf), order))


def draw_into(drawings: list[Drawing], desk: Desk, order: EngineOrder) -> None:
    """Draw a job, as a worker's own thread does, and add the drawing to the list."""
    drawings.append(desk.draw(order))
