"""Loads the networks of a model from safetensors files, and picks the element type that they compute in.

A file is read tensor by tensor, and each tensor is converted and copied to the device before the next one is read.
Weights are never in a mapped file: overwriting the file while a model runs would change its pictures, or kill its
process.

If the operator chooses no element type, a preset may name it, as that of the embedded model does, whose files are in
half precision to be small. Otherwise files in float32 are computed in float32 everywhere, so that pictures do not
change. Files in half precision are computed as they are on a GPU. On a CPU they are computed in bfloat16 or in float32,
whichever was measured to be faster: processors without bfloat16 instructions are many times slower in it, and in
float16 nearly all are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, ModelMixin
from diffusers.models.modeling_utils import no_init_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from bottega.model_files.presets import read_preset
from bottega.model_files.report import ModelReport, PartReport
from bottega.process.memory import available_bytes

_log = logging.getLogger(__name__)

AUTO = "auto"
NOWHERE = "meta"
"""Device of parts of which only the structure is loaded."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Names in headers of safetensors files.
_FILE_DTYPES = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# A linear layer and a convolution like those in SDXL's middle, which take milliseconds each.
_TOKENS, _WIDTH = 256, 1280
_CHANNELS, _SIDE = 320, 32
_ROUNDS = 3
# Rounds end after this time, because an element type that is so slow is not chosen anyway.
_PROBE_S = 0.5
# Float32 must be this many times as fast to be worth twice the memory, and to be chosen in every start alike.
_WORTH = 1.2
# Share of the available memory that the weights may take.
_MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimes:
    """Seconds of the same layers in both element types."""

    float32_s: float
    bfloat16_s: float


def pick_dtype(wanted: str, report: ModelReport, device: torch.device) -> torch.dtype:
    """Return the element type that a model computes in.

    Args:
        wanted: float32, float16, bfloat16, or auto.
        report: Report on the model's folder.
        device: Device that it computes on.

    Raises:
        ValueError: The model's preset is malformed.
    """
    preset = read_preset(report.folder)
    if wanted == AUTO and preset is not None and preset.dtype is not None:
        wanted = preset.dtype
    if wanted != AUTO:
        if wanted == "float16" and device.type == "cpu":
            _log.warning("float16 is many times slower than float32 or bfloat16 on a CPU; use dtype auto or bfloat16")
        return DTYPES[wanted]
    of_files = files_dtype(report)
    if of_files == torch.float32 or device.type != "cpu":
        return of_files
    dtype, why = _pick_for_cpu(4 * sum(part.parameters for part in report.parts.values()))
    facts = {"dtype": dtype_name(dtype), "files": dtype_name(of_files), "why": why}
    _log.info("an element type was chosen for the model", extra=facts)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return float32, float16 or bfloat16."""
    return str(dtype).removeprefix("torch.")


def files_dtype(report: ModelReport) -> torch.dtype:
    """Return the element type of most of the denoising network's files, by bytes."""
    sizes = report.denoiser.bytes_by_dtype
    return _FILE_DTYPES.get(max(sizes, key=lambda name: sizes[name]), torch.float32)


def probe_times() -> ProbeTimes:
    """Measure a linear layer and a convolution in both element types, for a fraction of a second each."""
    return ProbeTimes(float32_s=_seconds(torch.float32), bfloat16_s=_seconds(torch.bfloat16))


def _pick_for_cpu(float32_bytes: int) -> tuple[torch.dtype, str]:
    """Return the faster element type, and the reason for it.

    Args:
        float32_bytes: Size of the weights in float32.
    """
    left_bytes = available_bytes()
    if left_bytes is not None and float32_bytes > _MEMORY_SHARE * left_bytes:
        needed_gb, left_gb = float32_bytes / 1e9, left_bytes / 1e9
        return torch.bfloat16, f"its weights take {needed_gb:.1f} GB in float32, and {left_gb:.1f} GB are available"
    times = probe_times()
    ratio = times.bfloat16_s / times.float32_s
    why = f"bfloat16 takes {ratio:.2f} times as long as float32 on this CPU"
    return (torch.float32 if ratio > _WORTH else torch.bfloat16), why


@torch.inference_mode()
def _seconds(dtype: torch.dtype) -> float:
    """Return the shortest time of one round, because other processes may use the processor too."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tokens, matrix = drawn(_TOKENS, _WIDTH), drawn(_WIDTH, _WIDTH)
    image, kernel = drawn(1, _CHANNELS, _SIDE, _SIDE), drawn(_CHANNELS, _CHANNELS, 3, 3)

    def run() -> None:
        functional.linear(tokens, matrix)
        functional.conv2d(image, kernel, padding=1)

    return _shortest(run)


def _shortest(run: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    began_s, taken_s = clock(), list[float]()
    while len(taken_s) <= _ROUNDS and (len(taken_s) < 2 or clock() - began_s < _PROBE_S):
        round_s = clock()
        run()
        taken_s.append(clock() - round_s)
    return min(taken_s[1:])  # The first includes one-time work.


# Maximum number of names in a message; a network has hundreds.
_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device and element type of loaded weights."""

    device: torch.device
    dtype: torch.dtype
    on_read: Callable[[int], None]
    """Called with the number of bytes that were read since the last call."""


def load_network(kind: Any, part: PartReport, target: Placement) -> Any:
    """Load a Diffusers network in evaluation mode, with the weights that its `from_pretrained` gives it.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file has changed since it was checked.
    """
    folder = part.files[0].parent
    config = kind.load_config(folder, local_files_only=True)
    with no_init_weights(), init_empty_weights():
        network = kind.from_config(config)
    state: dict[str, Tensor] = {}
    for file in part.files:
        for name, tensor in _read(file, network, target.on_read):
            if kind is AutoencoderKL and not tensor.isfinite().all():
                raise ValueError(
                    f"{_short_path(file)}: the tensor {name} has values that are no finite numbers; download the file "
                    "again"
                )
            state[name] = tensor.to(target.device, target.dtype if tensor.is_floating_point() else tensor.dtype)
    _check_complete(folder, network.state_dict().keys() - state.keys())
    # Without requires_grad_(False), because PyTorch then uses other kernels, whose last bits differ from Diffusers'.
    # Nothing is kept for gradients, because every stage runs in inference mode.
    network.load_state_dict(state, strict=True, assign=True)
    return network.to(target.device).eval()


def load_text_encoder(kind: Any, part: PartReport, target: Placement) -> Any:
    """Load a text encoder in evaluation mode, as its `from_pretrained` does.

    transformers knows the names of weights in files. It maps the whole file, whose pages count as this process's memory
    until the weights have been copied.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file has changed since it was checked.
    """
    folder = part.files[0].parent
    with _naming(folder):
        encoder, found = kind.from_pretrained(
            folder,
            dtype=target.dtype,
            variant=part.variant or None,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    _check_complete(folder, found["missing_keys"])
    for parameter in encoder.parameters():
        parameter.data = parameter.data.to(target.device, copy=True)
        target.on_read(parameter.numel() * part.size_bytes // max(1, part.parameters))
    return encoder.to(target.device).eval()


def outline(kind: Any, part: PartReport, dtype: torch.dtype) -> Any:
    """Return a network or a text encoder as its configuration describes it, on the device meta and so without weights.

    It tells shapes and settings, and computes nothing but shapes.
    """
    folder = part.files[0].parent
    with torch.device(NOWHERE):
        if issubclass(kind, ModelMixin):
            return kind.from_config(kind.load_config(folder, local_files_only=True)).to(dtype).eval()
        return kind(kind.config_class.from_pretrained(folder, local_files_only=True)).to(dtype).eval()


def drop_halves(vae: AutoencoderKL, roles: Collection[str]) -> None:
    """Free the weights of the VAE's encoder or decoder if no role needs them."""
    unused = [] if "denoise" in roles else [vae.encoder, vae.quant_conv]
    unused += [] if "decode" in roles else [vae.decoder, vae.post_quant_conv]
    for network in unused:
        if network is not None:
            network.to(NOWHERE)


def size_bytes(network: nn.Module) -> int:
    """Return the bytes of a network's parameters and buffers that are loaded."""
    tensors = (tensor for own in (network.parameters(), network.buffers()) for tensor in own)
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type != NOWHERE)


def _read(file: Path, network: ModelMixin, on_read: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file that the network needs, by the network's names, in the order of the file."""
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    with _naming(file), safe_open(file, framework="pt", backend="pread") as reader:
        names = reader.offset_keys()
        current = _current_names(network, names)
        for name in names:
            tensor: Tensor = reader.get_tensor(name)
            on_read(tensor.nbytes)
            wanted = shapes.get(current[name])
            if wanted is None:
                continue  # Only training needs it.
            if tensor.shape != wanted:
                raise ValueError(f"{name} has the shape {list(tensor.shape)}, but its config.json says {list(wanted)}")
            yield current[name], tensor


def _current_names(network: ModelMixin, names: Iterable[str]) -> Mapping[str, str]:
    """Return the network's name of each tensor in a file, because attention layers of old VAEs had other names."""
    by_current = {name: name for name in names}
    network._fix_state_dict_keys_on_load(by_current)
    return {name: current for current, name in by_current.items()}


def _check_complete(folder: Path, missing: Iterable[str]) -> None:
    lacking = sorted(missing)
    if lacking:
        more = f" and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else ""
        listed = ", ".join(lacking[:_LISTED])
        raise ValueError(f"the weights in {_short_path(folder)} lack {listed}{more}; download the folder again")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors of this context."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"{_short_path(path)} cannot be read as safetensors: {error}") from error
    except ValueError as error:
        raise ValueError(f"{_short_path(path)}: {error}") from error


def _short_path(path: Path) -> str:
    """Return the end of a path for a message: the part's folder, without the model's."""
    return "/".join(path.parts[-2:]) if path.suffix else path.name
