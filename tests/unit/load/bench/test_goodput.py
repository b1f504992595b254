"""In simulated fleets, jobs go through their stages in order, and replicas of hot ControlNets keep jobs in time."""

from __future__ import annotations

import pytest

from load.bench.goodput import divide
from load.bench.goodput_controlnets import Side, share_in_time
from load.bench.sdxl_costs import StageCosts

COSTS = StageCosts(encode_s=0.001, row_s=0.05, controlnet_s=0.022, decode_s=0.08, denoiser_share=0.7)


def test_devices_are_divided_so_that_the_scarcest_stage_can_do_most() -> None:
    assert divide(8, [0.001, 3.0, 0.08]) == [1, 6, 1]
    assert divide(100, [1.0, 8.0, 1.0]) == [10, 80, 10]


@pytest.mark.parametrize("service", ["A", "B"])
def test_several_servers_of_hot_controlnets_keep_jobs_in_time(service: str) -> None:
    one, ranked, many = (share_in_time(service, 16, COSTS, length_s=60.0, seed=1, side=side) for side in Side)
    assert one < 0.2
    assert 0.8 < ranked <= many
