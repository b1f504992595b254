"""`python -m load.replay` against a real gateway and LoRA store, with a scripted worker and ControlNet server."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bottega.v1 import generation_pb2
from load.replay.__main__ import parse, run
from load.replay.mix import load_mix
from load.replay.plan import plan
from tests.fakes.scripted_worker import MODEL, ScriptedWorker
from tests.samples.controlnet_hosts import net
from tests.support.gateway_with_loras import House, lora_house

# One gateway for all tests here: its codec process takes a second to start. Each request has to go out within a tenth
# of a second of its time.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone]

# 18 requests in 1.2 s.
SHORT = ("--rate", "15", "--minutes", "0.02", "--no-bursts", "--no-curve")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with lora_house(tmp_path_factory.mktemp("house"), codec_processes=1) as house:
        nets = [net(name, base=MODEL.base, digest=digest * 64) for name, digest in (("edges", "a"), ("layout", "b"))]
        await house.gateway.controlnets("server", *nets, net("others", base="another", digest="c" * 64))
        yield house


@pytest_asyncio.fixture(loop_scope="module")
async def worker(house: House) -> ScriptedWorker:
    return await house.gateway.worker()


async def replayed(
    house: House, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any], str]:
    """The exit status, the line of JSON, and all that was written."""
    addresses = ("--address", house.gateway.address, "--fleet-address", house.gateway.fleet_address)
    status = await run(parse([*addresses, *SHORT, *arguments]))
    out, err = capsys.readouterr()
    return status, json.loads(out.splitlines()[-1]), out + err


async def test_the_requests_of_the_plan_arrive_as_planned_with_what_the_fleet_has(
    house: House, worker: ScriptedWorker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    histogram = tmp_path / "latencies.hgrm"
    status, said, text = await replayed(house, capsys, "--seed", "3", "--histogram", str(histogram))

    assert status == 0, text
    assert (said["requests"], said["answered"], said["void"]) == (18, 18, None), text
    assert said["offered_per_s"] == pytest.approx(15.0)
    assert 0 < said["p50_s"] <= said["p95_s"] <= said["most_s"] < 60
    assert "ControlNets, the most popular first: edges, layout\n" in text, "the third is for another model"
    assert "LoRAs, the most popular first: ink\n" in text
    overrides = {
        "rate_per_s": 15.0,
        "minutes": 0.02,
        "arrivals": {"bursts": None, "curve": None},
        "controlnets": {"names": ["edges", "layout"]},
        "loras": {"names": ["ink"]},
    }
    planned = plan(load_mix("day", overrides), 3)
    specs = [each.spec for each in worker.requests]
    assert {
        (spec.prompt, spec.seed, spec.num_inference_steps, bool(spec.mask_image), len(spec.loras)) for spec in specs
    } == {(each.prompt, each.seed, each.steps, each.kind == "edit", len(each.loras)) for each in planned}
    assert {each.kind for each in planned} == {"draw", "edit"}
    assert {spec.fidelity for spec in specs} == {generation_pb2.FIDELITY_BALANCED}
    assert re.search(r"^all +18 +18 +0 +0 +0 +0 ", text, re.MULTILINE), text
    assert re.search(r"^edits +\d+ +\d+ ", text, re.MULTILINE), text
    assert "TotalCount" in histogram.read_text()
