"""In half precision, a server says which residuals it computed beside others, and computes some alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bottega.addons.controlnets.engine import LocalControlNets
from tests.samples.controlnets import shelf_of
from tests.samples.small_model import small_model
from tests.support.controlled_engine import Desk, alone, controlled, on
from tests.support.linked_servers import Offers, linked_server
from tests.support.manual_engine import load


@pytest.mark.parametrize("may_share", [True, False])
def test_a_picture_whose_residuals_share_a_forward_is_not_exact(
    folders: Mapping[str, Path], tmp_path: Path, may_share: bool
) -> None:
    """Both sessions of the job have one ControlNet, so that the server computes each step of both at once."""
    half = load(small_model(), dtype=torch.bfloat16)
    with linked_server("half", folders, tmp_path, dtype=torch.bfloat16) as server, shelf_of(half, folders) as shelf:
        order = replace(on(controlled((1, 0.4), (1, 0.9)), server), shared_turns=may_share)
        drawing = Desk(half, Offers(server)).draw(order)
        assert drawing.record.provenance.mean_group_requests == 1
        assert drawing.record.shared_in_half_precision == may_share
        if not may_share:
            assert torch.equal(drawing.latents[0], alone(half, LocalControlNets(shelf), order))
