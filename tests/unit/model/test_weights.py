"""Weights are those that stock Diffusers loads, in every layout, in memory and in an element type that fits."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from bottega.model import weights as dtypes
from bottega.model.model import Model, load_model
from bottega.model.weights import ProbeTimes, files_dtype, pick_dtype, probe_times
from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.report import ModelReport
from tests.samples.published import Layout, published_model
from tests.support.manual_engine import load
from tests.support.slow_cases import in_every_run
from tests.support.stock import load_stock

LAYOUTS = {
    "plain": Layout(),
    "old VAE names": Layout(old_vae_names=True),
    "no prefix, no position ids": Layout(text_prefix=False, position_ids=False),
    "shards": Layout(shards=3),
    "fp16 beside plain": Layout(variants=("", "fp16")),
}
VARIANTS = {
    "fp16": Layout(variants=("fp16",)),
    "shards of fp16": Layout(variants=("fp16",), shards=2),
    "old names of shards": Layout(variants=("fp16",), shards=2, legacy_shard_names=True),
}
# Every layout, and every element type; which files are read does not depend on the type.
LOADS = [("plain", torch.float32), ("plain", torch.bfloat16), ("plain", torch.float16)]
LOADS += [
    (name, dtype) for name, dtype in zip(LAYOUTS, itertools.cycle([torch.float16, torch.bfloat16])) if name != "plain"
]


def parts(model: Model) -> dict[str, nn.Module]:
    first, second = model.text_encoders
    return {"unet": model.backbone.unet, "vae": model.vae, "text_encoder": first, "text_encoder_2": second}


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """The same values; the VAE's may be in float32, in which stock encodes and decodes with them, too."""
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == reference.keys()
    for name, tensor in reference.items():
        assert torch.equal(mine[name].double(), tensor.double()), name
    assert [weights.requires_grad for weights in ours.parameters()] == [
        weights.requires_grad for weights in theirs.parameters()
    ]
    assert not ours.training
    assert not any(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers()))


@pytest.mark.parametrize(("layout", "dtype"), in_every_run(LOADS, (LOADS[1], LOADS[3], LOADS[5])), ids=str)
def test_the_weights_are_those_of_stock_diffusers(layout: str, dtype: torch.dtype) -> None:
    folder = published_model(LAYOUTS[layout])
    stock = load_stock(folder, dtype)
    for name, part in parts(load(folder, dtype=dtype)).items():
        assert_same_weights(part, getattr(stock, name))


@pytest.mark.parametrize("layout", in_every_run(VARIANTS, {"old names of shards"}))
def test_weights_of_a_variant_are_those_of_stock_diffusers(layout: str) -> None:
    assert_loads_a_variant(published_model(VARIANTS[layout]))


def test_where_one_part_has_only_fp16_weights_every_part_that_has_them_takes_them(tmp_path: Path) -> None:
    folder = shutil.copytree(published_model(LAYOUTS["fp16 beside plain"]), tmp_path / "mixed")
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "vae" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    assert_loads_a_variant(folder)


def test_the_operators_variant_is_that_of_stock_diffusers() -> None:
    folder = published_model(Layout(variants=("", "fp16", "bf16")))
    stock = load_stock(folder, variant="bf16")
    model = load_model(folder, name="m", device=torch.device("cpu"), dtype=torch.float32, variant="bf16")
    for name, part in parts(model).items():
        assert_same_weights(part, getattr(stock, name))


def assert_loads_a_variant(folder: Path) -> None:
    stock = load_stock(folder, variant="fp16")
    for name, part in parts(load(folder)).items():
        assert_same_weights(part, getattr(stock, name))


def test_no_weight_lies_in_a_mapped_file() -> None:
    folder = published_model()
    model = load(folder)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert model is not None
    assert not mapped


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in shards, to spoil."""
    return shutil.copytree(published_model(Layout(shards=3)), tmp_path / "model")


INDEX = "unet/diffusion_pytorch_model.safetensors.index.json"


def lose_a_shard(folder: Path) -> None:
    next((folder / "unet").glob("*-00002-*")).unlink()


def lose_a_tensor(folder: Path) -> None:
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    del weights["decoder.conv_out.bias"]
    save_file(weights, path)


def lose_a_text_weight(folder: Path) -> None:
    path = folder / "text_encoder_2" / "model.safetensors"
    weights = load_file(path)
    del weights["text_projection.weight"]
    save_file(weights, path)


def point_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["conv_in.weight"] = "../vae/diffusion_pytorch_model.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lose_a_shard, "unet/diffusion_pytorch_model-00002-of-00003.safetensors .*: there is no such file"),
        (lose_a_tensor, "tensors are missing, such as decoder.conv_out.bias; download the file again"),
        (lose_a_text_weight, "tensors are missing, such as text_projection.weight"),
        (point_outside, "which leads out of its folder"),
        (lambda folder: (folder / INDEX).write_text("[]"), "it is JSON, but no object"),
    ],
    ids=["no shard", "no tensor", "no text weight", "outside", "no index"],
)
def test_weights_that_are_not_all_there_are_refused_by_name(
    folder: Path, spoil: Callable[[Path], object], why: str
) -> None:
    spoil(folder)
    with pytest.raises(ConfigError, match=why):
        load(folder)


# It loads a UNet whose files are twice as large as its weights in bfloat16, and says what it took at most.
_MEASURE = """
import sys
from pathlib import Path
import torch
from diffusers import UNet2DConditionModel
from bottega.model.weights import Placement, load_network
from bottega.model_files.report import PartReport
from bottega.process.memory import keep_freed_memory

def peak_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10

keep_freed_memory()
before = peak_bytes()
target = Placement(device=torch.device("cpu"), dtype=torch.bfloat16, on_read=lambda _: None)
file = Path(sys.argv[1])
part = PartReport(name="unet", folder=file.parent, class_name="UNet2DConditionModel", files=(file,))
unet = load_network(UNet2DConditionModel, part, target)
print(sum(weights.nbytes for weights in unet.parameters()), peak_bytes() - before)
"""
# Of what reading one tensor takes, and what Python and the allocator do.
_SLACK_BYTES = 48 << 20


def test_loading_takes_little_memory_beside_the_weights(tmp_path: Path) -> None:
    config = json.loads((published_model() / "unet" / "config.json").read_text())
    changes = {"block_out_channels": [128, 256, 512], "attention_head_dim": [2, 4, 8]}
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config | changes)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    zeros = {name: torch.zeros(weights.shape) for name, weights in unet.state_dict().items()}
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file(zeros, weights)
    command = [sys.executable, "-c", _MEASURE, str(weights)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    weights_bytes, taken_bytes = map(int, said.split())
    assert weights_bytes > 2 * _SLACK_BYTES, "large enough to tell"
    assert taken_bytes <= 1.15 * weights_bytes + _SLACK_BYTES


CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
BFLOAT16_IS_FASTER = ProbeTimes(float32_s=1.0, bfloat16_s=0.4)
BFLOAT16_IS_SLOWER = ProbeTimes(float32_s=1.0, bfloat16_s=7.0)
ABOUT_ALIKE = ProbeTimes(float32_s=1.0, bfloat16_s=1.1)


def report(folder: Path) -> ModelReport:
    return check_model_folder(folder)


def half() -> ModelReport:
    """Of a model whose files are float16, as most published ones are."""
    return report(published_model(Layout(variants=("fp16",))))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the probe says, where it is asked."""
    probe = SimpleNamespace(times=BFLOAT16_IS_FASTER, asked=0)

    def answer() -> ProbeTimes:
        probe.asked += 1
        assert isinstance(probe.times, ProbeTimes)
        return probe.times

    monkeypatch.setattr(dtypes, "probe_times", answer)
    return probe


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_files_in_float32_are_computed_in_float32_and_nothing_is_measured(
    device: torch.device, measured: SimpleNamespace
) -> None:
    assert pick_dtype("auto", report(published_model()), device) == torch.float32
    assert measured.asked == 0


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_a_preset_says_what_its_model_computes_in_and_an_operator_has_the_last_word(
    device: torch.device, measured: SimpleNamespace
) -> None:
    embedded = report(WEIGHTS)
    assert files_dtype(embedded) == torch.float16, "to be small"
    assert pick_dtype("auto", embedded, device) == torch.float32
    assert pick_dtype("bfloat16", embedded, device) == torch.bfloat16
    assert measured.asked == 0


def test_files_in_half_precision_are_computed_as_they_are_on_a_gpu(measured: SimpleNamespace) -> None:
    assert files_dtype(half()) == torch.float16
    assert pick_dtype("auto", half(), GPU) == torch.float16
    assert measured.asked == 0


@pytest.mark.parametrize(
    ("times", "wanted"),
    [(BFLOAT16_IS_FASTER, torch.bfloat16), (BFLOAT16_IS_SLOWER, torch.float32), (ABOUT_ALIKE, torch.bfloat16)],
    ids=["bfloat16 is faster", "bfloat16 is slower", "about alike"],
)
def test_files_in_half_precision_are_computed_in_what_a_cpu_is_faster_in(
    times: ProbeTimes, wanted: torch.dtype, measured: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    measured.times = times
    assert pick_dtype("auto", half(), CPU) == wanted
    said = vars(caplog.records[-1])
    assert (said["files"], said["dtype"]) == ("float16", str(wanted).removeprefix("torch."))
    assert "times as long as float32 on this CPU" in said["why"]


def test_float32_is_not_chosen_where_there_is_no_memory_for_it(
    measured: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.times = BFLOAT16_IS_SLOWER
    needed = 4 * sum(part.parameters for part in half().parts.values())
    monkeypatch.setattr(dtypes, "available_bytes", lambda: needed)
    assert pick_dtype("auto", half(), CPU) == torch.bfloat16
    assert measured.asked == 0


def test_float16_on_a_cpu_is_taken_where_it_is_said_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert pick_dtype("float16", half(), CPU) == torch.float16
    assert "float16 is many times slower" in caplog.text
    caplog.clear()
    assert pick_dtype("float16", half(), GPU) == torch.float16
    assert pick_dtype("bfloat16", half(), CPU) == torch.bfloat16
    assert not caplog.records


def test_the_probe_measures_both_element_types() -> None:
    times = probe_times()
    assert 0 < times.float32_s < 10
    assert 0 < times.bfloat16_s < 10
