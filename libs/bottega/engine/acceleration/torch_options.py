"""Accelerations without kernels of our own: attention backends, compiled blocks, memory layout, copies, and float8.

PyTorch chooses an attention backend by the input sizes. The fastest one also depends on the device and its libraries,
so the self-check measures each, and the package flash_attn if it is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from bottega.device.devices import CudaDevice
from bottega.engine.acceleration.acceleration import Forwards
from bottega.model.model import Model

_HALVES = frozenset({torch.float16, torch.bfloat16})
# Largest number of channels of a head that FlashAttention supports.
_MOST_HEAD_CHANNELS = 256

Attention = Callable[..., Tensor]


class AttentionBackend:
    """Makes PyTorch prefer one of its attention backends: flash, efficient or cudnn. The others remain as fallbacks.

    No backend is switched off: a VAE has one head of 512 channels, which two of them do not support, and the memory of
    the plain backend grows with the square of the number of pixels.
    """

    probe = "forward"
    # Backends sum in different orders and round to half precision, in seventy consecutive blocks.
    tolerance = 0.02

    def __init__(self, way: str) -> None:
        self.name = f"attention.{way}"
        self.excludes: Sequence[str] = tuple(name for name in ATTENTIONS if name != self.name)
        self._way = way
        self._before: list[int] | None = None

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda":
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        if self._way in {"flash", "cudnn"} and model.dtype not in _HALVES:
            return f"it computes in float16 and bfloat16, and the model is {model.dtype_name}"
        return ""

    def enable(self, model: Model) -> None:
        # torch sets its own order at the first attention of a process on a device. The check's plain runs came before.
        self._before = torch._C._get_sdp_priority_order()
        first = _WAYS[self._way]
        torch._C._set_sdp_priority_order([first, *(way for way in self._before if way != first)])

    def disable(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            torch._C._set_sdp_priority_order(before)


class FlashAttention:
    """Uses the package flash_attn instead of PyTorch's attention wherever it supports the inputs."""

    name = "attention.flash_attn"
    probe = "forward"
    tolerance = 0.02

    def __init__(self) -> None:
        self.excludes: Sequence[str] = tuple(name for name in ATTENTIONS if name != self.name)
        self._plain: Attention | None = None

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda":
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        if find_spec("flash_attn") is None:
            return "flash_attn is not installed"
        if model.dtype not in _HALVES:
            return f"it computes in float16 and bfloat16, and the model is {model.dtype_name}"
        return ""

    def enable(self, model: Model) -> None:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        self._plain = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = _flash(self._plain, flash_attn_func)

    def disable(self) -> None:
        plain, self._plain = self._plain, None
        if plain is not None:
            functional.scaled_dot_product_attention = plain


def _flash(plain: Attention, flash: Attention) -> Attention:
    """Return PyTorch's attention function, which calls FlashAttention for inputs that it supports."""

    def attention(  # noqa: PLR0917 - the parameters of the function that it replaces
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        more = attn_mask is not None or dropout_p or is_causal or any(option is not None for option in options.values())
        if more or query.dim() != 4 or query.dtype not in _HALVES or query.shape[-1] > _MOST_HEAD_CHANNELS:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        return flash(*(tensor.transpose(1, 2) for tensor in (query, key, value))).transpose(1, 2)

    return attention


_WAYS: dict[str, int] = {
    "flash": SDPBackend.FLASH_ATTENTION.value,
    "efficient": SDPBackend.EFFICIENT_ATTENTION.value,
    "cudnn": SDPBackend.CUDNN_ATTENTION.value,
}
ATTENTIONS = ("attention.flash_attn", "attention.cudnn", "attention.flash", "attention.efficient")


_REGIONS = (BasicTransformerBlock, ResnetBlock2D)


class RegionalCompile:
    """Compiles the network's blocks. Blocks of the same kind share compiled code for the same shapes."""

    name = "compile"
    probe = "forward"
    tolerance = 0.02
    """Fused operators keep intermediate values in float32, and the plain path rounds them."""
    excludes: Sequence[str] = ("graphs", "kernels.geglu", "kernels.group_norm_silu")

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._forwards = Forwards()

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda" and self._backend == "inductor":
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        return "" if any(_regions(model)) else "the network has no block of a known kind"

    def enable(self, model: Model) -> None:
        for module in _regions(model):
            compiled = torch.compile(module.forward, backend=self._backend)
            self._forwards.replace(module, _forward(module, compiled))

    def disable(self) -> None:
        self._forwards.restore()


def _forward(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the block's forward: compiled, or the block's own while a layer of it has a hook."""
    plain, layers = module.forward, [layer for layer in module.modules() if layer is not module]

    def forward(*inputs: Any, **options: Any) -> Any:
        hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        return (plain if hooked else compiled)(*inputs, **options)

    return forward


def _regions(model: Model) -> Iterator[nn.Module]:
    for module in model.backbone.network.modules():
        if type(module) in _REGIONS:
            yield module


# Compute capability of the first GPUs with float8.
_FLOAT8_CAPABILITY = (8, 9)


class Float8Weights:
    """Stores the weights of the denoising network's linear layers in float8, which halves their memory.

    torchao scales each row of a weight, and converts the weights to the model's data type in each forward pass, which
    takes time. The plain weights are in host memory meanwhile, so that `disable` restores them bit for bit.
    """

    name = "weights.float8"
    probe = "forward"
    tolerance = 0.1
    """float8 has three bits behind the leading one, so that each weight differs by up to a 16th of itself."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._model: Model | None = None
        self._plain: dict[nn.Linear, tuple[Any, Tensor]] = {}
        """Parameter of each layer that was replaced, and its value on the host."""
        self._saved_bytes = 0

    def unsupported(self, model: Model) -> str:
        if model.device.type != "cuda":
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        if find_spec("torchao") is None:
            return "torchao is not installed: pip install 'bottega-services[float8]'"
        if (capability := torch.cuda.get_device_capability(model.device)) < _FLOAT8_CAPABILITY:
            own, least = (".".join(map(str, version)) for version in (capability, _FLOAT8_CAPABILITY))
            return f"it needs a device of compute capability {least}, and this one has {own}"
        if model.dtype not in _HALVES:
            return f"it is for float16 and bfloat16, and the model is {model.dtype_name}"
        return ""

    def enable(self, model: Model) -> None:
        from torchao.quantization import Float8WeightOnlyConfig, quantize_  # type: ignore[import-not-found]

        layers = [module for module in model.backbone.network.modules() if type(module) is nn.Linear]
        model.memory.keep_on_host(self.name, sum(layer.weight.nbytes for layer in layers))
        self._model, config = model, Float8WeightOnlyConfig(set_inductor_config=False)
        model.operations.rounds_weights = True
        # Parameters of inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for module in layers:
                weight = module.weight
                self._plain[module] = (weight, weight.data.to("cpu", copy=True))
                quantize_(module, config)
                saved_bytes = weight.numel() * (weight.itemsize - 1)
                weight.data = weight.data.new_empty(0)  # frees the device's memory
                model.memory.grow("model", -saved_bytes)
                self._saved_bytes += saved_bytes

    def disable(self) -> None:
        model, self._model = self._model, None
        if model is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            while self._plain:
                module, (weight, plain) = self._plain.popitem()
                weight.data = plain.to(model.device)
                module.weight = weight
                module.__dict__.pop("extra_repr", None)  # which torchao sets
        model.memory.grow("model", self._saved_bytes)
        model.memory.release(self.name)
        self._saved_bytes = 0
        model.operations.rounds_weights = False


_PROBES = {"unet": "forward", "vae": "decode"}


class ChannelsLast:
    """Stores the weights of the denoising network or the VAE with channels last."""

    tolerance = 0.01
    """With channels last, convolutions add in a different order, so results differ slightly. The VAE is compared by its
    8-bit pixels."""
    excludes: Sequence[str] = ()

    def __init__(self, part: Literal["unet", "vae"]) -> None:
        self.name = f"channels_last.{part}"
        self.probe = _PROBES[part]
        self._of_network = part == "unet"
        self._model: Model | None = None

    def unsupported(self, model: Model) -> str:
        return "the network is a transformer" if self._of_network and model.unet is None else ""

    def enable(self, model: Model) -> None:
        self._model = model
        _lay_out(self._part(model), torch.channels_last)

    def disable(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            _lay_out(self._part(model), torch.contiguous_format)

    def _part(self, model: Model) -> nn.Module:
        network: nn.Module = model.backbone.network if self._of_network else model.vae
        return network


def _lay_out(network: Any, layout: torch.memory_format) -> None:
    # `network` is Any, because the type stubs of Module.to lack memory_format. The check runs in inference mode;
    # weights created in it could not be written outside of it.
    with torch.inference_mode(False), torch.no_grad():
        network.to(memory_format=layout)


class PageableCopies:
    """Copies to and from the device through normal memory, which can be swapped out ("pageable").

    The plain path uses pinned memory, so that the engine's thread continues during copies. On some devices pinning
    costs more than it gains.
    """

    name = "copies.pageable"
    probe = "copies"
    tolerance = 0.001
    """Copies are exact; the steps around them may sum in another order."""
    excludes: Sequence[str] = ()

    def __init__(self) -> None:
        self._device: CudaDevice | None = None

    def unsupported(self, model: Model) -> str:
        if not isinstance(model.runtime, CudaDevice):
            return f"it needs a CUDA device, and the model is on {model.device.type}"
        return ""

    def enable(self, model: Model) -> None:
        assert isinstance(model.runtime, CudaDevice), "checked by `unsupported`"
        self._device = model.runtime
        self._device.pageable = True

    def disable(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.pageable = False
