"""How long does loading a model take, and how much memory, against Diffusers' `from_pretrained` of the same folder?

The folder has the topology of a published model, with random weights in bfloat16. Each side loads in a process of its
own, by turns, after it has imported what it needs; the files are in the system's cache. Ours also hashes each version
of a file, once. Diffusers only maps files whose element type it keeps: its first picture reads them.

A run takes 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

from bottega.model.loading import load_model
from bottega.model_files.configuration_rules import filled_config
from bottega.model_files.digest import KnownDigests
from bottega.model_files.single_file_folder import model_index, tokenizer_configs
from bottega.model_files.tensor_check import text_encoder_tensors, unet_tensors, vae_tensors
from bottega.worker.conversion.folder import write_vocabulary
from load.bench.framework import Bench, Option, Sheet, by_turns, seconds_of
from load.bench.side_process import Answer, Side

Config = Mapping[str, Any]

BENCH = Bench(
    __file__,
    __doc__,
    Option("--topology", "sdxl", "of the model", smallest="tiny", choices=("sd15", "sdxl", "tiny")),
    Option("--rounds", 3, "of both sides", smallest=1),
    Option("--threads", 2, "of torch"),
)

_GIB = 1 << 30
_VAE: dict[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}
_CLIP_L: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "projection_dim": 768,
}
_CLIP_G: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 20,
    "num_hidden_layers": 32,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
_SDXL_UNET: dict[str, Any] = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
_TINY_CLIP: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
}
TOPOLOGIES: Mapping[str, Mapping[str, Config]] = {
    "sd15": {"unet": {"cross_attention_dim": 768, "sample_size": 64}, "vae": _VAE, "text_encoder": _CLIP_L},
    "sdxl": {
        "unet": _SDXL_UNET,
        "vae": _VAE | {"scaling_factor": 0.13025, "sample_size": 1024},
        "text_encoder": _CLIP_L,
        "text_encoder_2": _CLIP_G,
    },
    "tiny": {
        "unet": _SDXL_UNET
        | {
            "attention_head_dim": 1,
            "block_out_channels": [32, 32, 32],
            "cross_attention_dim": 128,
            "projection_class_embeddings_input_dim": 64 + 6 * 256,
            "sample_size": 8,
            "transformer_layers_per_block": 1,
        },
        "vae": _VAE
        | {"block_out_channels": [32, 32], "down_block_types": ["DownEncoderBlock2D"] * 2}
        | {"up_block_types": ["UpDecoderBlock2D"] * 2},
        "text_encoder": _TINY_CLIP | {"projection_dim": 64},
        "text_encoder_2": _TINY_CLIP | {"projection_dim": 64},
    },
}
_SCHEDULER = {"beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "steps_offset": 1}


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Write the model, and load it by turns."""
    model = folder / "model"
    weights_bytes = write_model(model, options.topology)
    made = {"Diffusers": theirs, "Bottega": ours, "Bottega again": ours_again}
    sides = {name: _loader(make, model, options.threads) for name, make in made.items()}
    found = by_turns(sides, options.rounds)
    seconds = {name: median(answer["seconds"] for answer in answers) for name, answers in found.items()}
    peaks = {name: max(answer["peak_bytes"] for answer in answers) for name, answers in found.items()}
    for name in sides:
        key = name.lower().replace(" ", "_")
        sheet.figure(f"{name}: seconds", seconds[name], key=f"{key}_s")
        bar = f"at most {(1.15 * weights_bytes + 2 * _GIB) / _GIB:.2f}" if name != "Diffusers" else ""
        sheet.figure(f"{name}: peak memory, GiB", peaks[name] / _GIB, key=f"{key}_peak_gib", bar=bar)
    sheet.figure("weights, GiB", weights_bytes / _GIB, key="weights_gib")
    sheet.figure("their seconds over ours", seconds["Diffusers"] / seconds["Bottega"], key="ratio")
    sheet.figure("our peak over theirs", peaks["Bottega"] / peaks["Diffusers"], key="memory_ratio")


def ours(model: str) -> Answer:
    """Return a side that loads with the suite."""
    return _ours(model, KnownDigests())


def ours_again(model: str) -> Answer:
    """Return a side that loads with the suite what has been loaded before."""
    known = KnownDigests(Path(model).parent / "digests.json")
    for file in Path(model).rglob("*.safetensors"):
        known.digest(file)
    return _ours(model, known)


def _ours(model: str, known: KnownDigests) -> Answer:
    def answer() -> Mapping[str, float]:
        loaded: list[object] = []
        options: dict[str, Any] = {
            "name": "model",
            "device": torch.device("cpu"),
            "dtype": torch.bfloat16,
            "known_digests": known,
        }
        seconds = seconds_of(lambda: loaded.append(load_model(Path(model), **options)))
        return {"seconds": seconds, "peak_bytes": _peak_bytes()}

    return answer


def theirs(model: str) -> Answer:
    """Return a side that loads with Diffusers."""

    def answer() -> Mapping[str, float]:
        loaded: list[object] = []
        options = {"dtype": torch.bfloat16, "use_safetensors": True, "local_files_only": True}
        seconds = seconds_of(lambda: loaded.append(DiffusionPipeline.from_pretrained(model, **options)))
        return {"seconds": seconds, "peak_bytes": _peak_bytes()}

    return answer


def _loader(make: Any, model: Path, threads: int) -> Any:
    def load(_: int) -> Mapping[str, float]:
        with Side(make, threads=threads, model=model) as side:
            return side.ask()

    return load


def _peak_bytes() -> int:
    """Return the most memory that was resident in this process, mapped files included."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def write_model(folder: Path, topology: str) -> int:
    """Write a model of a topology with random weights in bfloat16, and return the bytes of its weights."""
    configs = TOPOLOGIES[topology]
    family = "sdxl" if "text_encoder_2" in configs else "sd15"
    total = 0
    for part, config in configs.items():
        total += _write_part(folder / part, part, config)
    for part in ("tokenizer", "tokenizer_2")[: len(configs) - 2]:
        (folder / part).mkdir()
        write_vocabulary(folder / part)
        for name, values in tokenizer_configs(family, part).items():
            _write_json(folder / part / name, values)
    scheduler = "DDIMScheduler"
    _write_json(folder / "scheduler" / "scheduler_config.json", {**_SCHEDULER, "_class_name": scheduler})
    _write_json(folder / "model_index.json", model_index(family) | {"scheduler": ["diffusers", scheduler]})
    return total


def _write_part(folder: Path, part: str, config: Config) -> int:
    classes = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL"}
    is_text = part.startswith("text_encoder")
    named = {"model_type": "clip_text_model", "vocab_size": 49408} if is_text else {"_class_name": classes[part]}
    _write_json(folder / "config.json", {**named, **config})
    filled = filled_config(part, {**named, **config})
    if is_text:
        prefix = "text_model."
        shapes = {
            name if name.startswith("text_projection") else prefix + name: shape
            for name, shape in text_encoder_tensors(filled, projects=part == "text_encoder_2")
        }
    else:
        shapes = dict(unet_tensors(filled) if part == "unet" else vae_tensors(filled))
    state = {name: torch.randn(shape, dtype=torch.bfloat16).mul_(0.02) for name, shape in shapes.items()}
    file = "model.safetensors" if is_text else "diffusion_pytorch_model.safetensors"
    save_file(state, folder / file, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in state.values())


def _write_json(path: Path, values: Config) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    sys.exit(BENCH.command())
