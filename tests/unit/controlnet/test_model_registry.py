"""ControlNets are loaded in the element type of the worker that wants them, each once for each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bottega.addons.controlnets.engine import ControlLayout, LoadedControlNet, base_layout
from bottega.controlnet.model_registry import ControlNetReference, ModelRegistry
from bottega.errors import ControlNetUnusable
from bottega.v1 import hosted_pb2
from tests.samples.published import Layout, published_model
from tests.support.manual_engine import load
from tests.support.waiting import wait_until

WAIT_S = 30.0


@pytest.fixture(scope="module")
def folder() -> Path:
    """A ControlNet's, in float16."""
    return published_model(Layout(variants=("fp16",))) / "controlnets" / "canny"


@pytest.fixture(scope="module")
def base() -> ControlLayout:
    model = load(published_model())
    return base_layout(model.backbone.network.config, model.latent_scale)


@contextmanager
def registry(dtype: torch.dtype | None = None) -> Iterator[ModelRegistry]:
    found = ModelRegistry(budget_bytes=1 << 30, device=torch.device("cpu"), dtype=dtype, alive=lambda: None)
    try:
        yield found
    finally:
        found.cache.close()


@contextmanager
def borrowed(found: ModelRegistry, base: ControlLayout, dtype: torch.dtype) -> Iterator[LoadedControlNet]:
    lease = found.borrow([ControlNetReference(name="canny", digest="")], base=base, dtype=dtype)
    try:
        (net,) = lease.values.result(WAIT_S)
        yield net
    finally:
        found.cache.give_back(lease)


def test_each_worker_gets_it_in_its_own_element_type(folder: Path, base: ControlLayout) -> None:
    with registry() as found:
        parameters = found.add("canny", folder).size_bytes // 2
        with borrowed(found, base, torch.float32) as whole, borrowed(found, base, torch.bfloat16) as half:
            assert (whole.dtype, half.dtype) == (torch.float32, torch.bfloat16)
            assert next(half.network.parameters()).dtype == torch.bfloat16
            assert found.cache.used_bytes == 6 * parameters
            (report,) = found.report({})
            assert (report.name, report.state) == ("canny", hosted_pb2.HOSTED_STATE_LOADED)
        with borrowed(found, base, torch.float32) as again:
            assert again is whole


def test_what_is_prefetched_is_in_the_element_type_of_the_last_worker(folder: Path, base: ControlLayout) -> None:
    with registry() as found:
        size_bytes = found.add("canny", folder).size_bytes
        found.prefetch(["canny"])
        wait_until(lambda: found.cache.used_bytes == size_bytes, "it is loaded")
        with borrowed(found, base, torch.bfloat16):
            assert found.cache.used_bytes == size_bytes, "as workers on a CPU choose for files in half precision"
        with borrowed(found, base, torch.float32):
            assert found.cache.used_bytes == 3 * size_bytes
        (report,) = found.report({})
        assert report.size_bytes == 2 * size_bytes


def test_a_load_that_fails_is_reported_with_its_reason_until_one_succeeds(
    folder: Path, base: ControlLayout, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "canny"))
    (weights,) = copy.glob("*.safetensors")
    intact = weights.read_bytes()
    with registry() as found:
        found.add("canny", copy)
        weights.write_bytes(b"damaged")
        found.prefetch(["canny"])
        wait_until(lambda: bool(found.report({})[0].load_error), "the load has failed")
        assert found.report({})[0].state == hosted_pb2.HOSTED_STATE_ON_DISK
        weights.write_bytes(intact)
        found.prefetch(["canny"])
        assert found.report({})[0].failed_loads == 1
        found.prefetch(["canny"], retry=True)
        wait_until(lambda: found.report({})[0].state == hosted_pb2.HOSTED_STATE_LOADED, "it is loaded again")
        assert not found.report({})[0].load_error
        with borrowed(found, base, torch.bfloat16):
            assert found.report({})[0].failed_loads == 1


def test_a_server_of_one_element_type_refuses_workers_of_another(folder: Path, base: ControlLayout) -> None:
    with registry(torch.float32) as found:
        found.add("canny", folder)
        with (
            pytest.raises(ControlNetUnusable, match="computes in float32 and the worker in bfloat16"),
            borrowed(found, base, torch.bfloat16),
        ):
            pass
        with borrowed(found, base, torch.float32) as net:
            assert net.dtype == torch.float32
