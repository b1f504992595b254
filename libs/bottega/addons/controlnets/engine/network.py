"""A ControlNet in a folder of Diffusers' layout: finding, checking, sizing, loading and running it.

Only safetensors files are opened. The folder is untrusted: its configuration is checked before anything is built from
it, and weights are read only if they match the built network.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import ControlNetModel, ControlNetUnionModel, FluxControlNetModel, SD3ControlNetModel
from torch import Tensor, nn

from bottega.device.devices import open_device
from bottega.errors import ControlNetUnusable, InvalidRequest
from bottega.model.backbone import POOLED, Inputs
from bottega.model.backbones.flux import FluxBackbone
from bottega.model_files.control_layout import ControlLayout, controlnet_layout
from bottega.model_files.controlnet_config import (
    AnyNetworkConfig,
    FluxNetworkConfig,
    NetworkConfig,
    Sd3NetworkConfig,
    UnionConfig,
)
from bottega.model_files.controlnet_folder import WeightsFile, check_same, naming, opened_weights, read_checked_config
from bottega.safetensors_header import TensorEntry

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetSource:
    """A ControlNet on disk that fits the base model, and can be loaded."""

    name: str
    folder: Path
    root: Path | None
    """Folder that must contain all of the ControlNet's files after links are resolved; None if its operator chose the
    folder."""
    dtype: torch.dtype
    size_bytes: int
    """Bytes of the weights after loading."""
    layout: ControlLayout
    modes: int = 0
    """Number of control modes; 0 if it is not a union."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnionImages:
    """The modes and scales of a union's images in a batch, all of whose rows have as many images."""

    modes: Tensor
    """Mode of each image, [rows, images]."""
    scales: tuple[float, ...]
    """Factor of each image inside the network, the same in all rows."""


class LoadedControlNet(ABC):
    """A ControlNet with weights. Run it in inference mode.

    `network` is Diffusers' network. What it makes of the control image is the same at every step, so `embed` computes
    it once.
    """

    streams: ClassVar[bool]
    """Whether `residuals` computes while it yields, so that each residual is worth sending at once."""

    def __init__(self, source: ControlNetSource, network: Any) -> None:
        self.name = source.name
        self.layout = source.layout
        self.modes = source.modes
        self.device = network.device
        self.dtype = source.dtype
        self.network = network

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads latents as the model's transformer embeds them, because it has no embedding of its own."""
        return False

    @torch.inference_mode()
    def embed(self, image: Tensor, *, rows: int) -> Tensor:
        """Return the embedded control image, without a dimension of rows.

        Args:
            image: For a UNet pixels [3, height, width], 0 to 1; for a transformer a latent [channels, height, width] in
                the model's scale.
            rows: Number of rows of the batch that will use it. A batch of one row is rounded differently.
        """
        # Measured on the CPU: the last bit differs between one row and several. It is the same for 2, 3, 4, 5, 6 and 8
        # rows.
        on_device = open_device(self.device).to_device(image, self.dtype)
        batch = on_device.expand(min(rows, 2), *image.shape).contiguous()
        return self.embed_batch(batch)[0]

    @abstractmethod
    def embed_batch(self, images: Tensor) -> Tensor:
        """Return embedded control images. The first dimension is the row."""

    @abstractmethod
    def residuals(
        self, inputs: Inputs, embedded: Sequence[Tensor], union: UnionImages | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each residual and the residual of all rows, unscaled, in the order in which they are sent.

        Args:
            inputs: The rows. `sample` is [rows, tokens, width] if the network `reads_tokens`.
            embedded: Results of `embed` for each image, stacked over the rows. Only a union for a UNet has several
                images.
            union: What the images show; None if the network is not a union.
        """


class UNetControlNet(LoadedControlNet):
    """A ControlNet for a UNet, as ControlNetModel and ControlNetUnionModel of Diffusers.

    Its residuals are [rows, channels, height, width]: one for each skip connection of the UNet, then that of the middle
    block. They are yielded deepest first, when all have been computed.
    """

    streams = False

    def __init__(self, source: ControlNetSource, network: ControlNetModel | ControlNetUnionModel) -> None:
        super().__init__(source, network)
        self.embedding = network.controlnet_cond_embedding
        self._flipped = network.config.controlnet_conditioning_channel_order == "bgr"
        network.controlnet_cond_embedding = nn.Identity()
        if isinstance(network, ControlNetUnionModel):
            network.transformer_layes = nn.ModuleList(map(_RowByRow, network.transformer_layes))
        # Otherwise the forward would flip the embedding as if it were the image.
        network.register_to_config(controlnet_conditioning_channel_order="rgb")

    def embed_batch(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(images.flip(1) if self._flipped else images)
        return embedded

    @torch.inference_mode()
    def residuals(
        self, inputs: Inputs, embedded: Sequence[Tensor], union: UnionImages | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        images: dict[str, Any] = {"controlnet_cond": embedded[0]}
        if union is not None:
            control_type = torch.zeros(len(union.modes), self.modes, device=self.device, dtype=self.dtype)
            images = {
                "controlnet_cond": list(embedded),
                "control_type": control_type.scatter_(1, union.modes, 1.0),
                # Indexes the task embeddings row by row, where Diffusers has one number for all rows.
                "control_type_idx": list(union.modes.unbind(1)),
                "conditioning_scale": list(union.scales),
            }
        skips, middle = self.network(
            inputs.sample,
            inputs.timestep,
            encoder_hidden_states=inputs.prompt_embeds,
            added_cond_kwargs=dict(inputs.added),
            return_dict=False,
            **images,
        )
        yield from reversed(list(enumerate([*skips, middle])))


class Sd3ControlNet(LoadedControlNet):
    """A ControlNet for the transformer of Stable Diffusion 3, as SD3ControlNetModel of Diffusers.

    Its residuals are [rows, tokens, width], one for each of its blocks. Each is yielded when its block has run, bit for
    bit as the forward of Diffusers computes it.
    """

    streams = True

    @property
    def reads_tokens(self) -> bool:
        return self.network.pos_embed is None

    def embed_batch(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.network.pos_embed_input(images)
        return embedded

    @torch.inference_mode()
    def residuals(
        self, inputs: Inputs, embedded: Sequence[Tensor], union: UnionImages | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        network = self.network
        pooled = inputs.added[POOLED].to(self.dtype)
        if network.config.force_zeros_for_pooled_projection:
            pooled = torch.zeros_like(pooled)
        hidden = _like_patches(inputs.sample) if self.reads_tokens else network.pos_embed(inputs.sample)
        embedding = network.time_text_embed(inputs.timestep, pooled)
        hidden = hidden + _like_patches(embedded[0])
        context = None if network.context_embedder is None else network.context_embedder(inputs.prompt_embeds)
        blocks = zip(network.transformer_blocks, network.controlnet_blocks, strict=True)
        for index, (block, projection) in enumerate(blocks):
            if context is None:
                hidden = block(hidden, embedding)
            else:
                context, hidden = block(hidden_states=hidden, encoder_hidden_states=context, temb=embedding)
            yield index, projection(hidden)


class FluxControlNet(LoadedControlNet):
    """A ControlNet for the transformer of Flux.1 (FluxControlNetModel of Diffusers), which may be a union.

    Its residuals are [rows, tokens, width]: one for each of its joint blocks, then one for each of its single blocks.
    Each residual is yielded when its block has run, and is bit-equal to that of FluxControlNetModel.forward.
    """

    streams = True

    def __init__(self, source: ControlNetSource, network: FluxControlNetModel) -> None:
        super().__init__(source, network)
        self._backbone = FluxBackbone(network)

    def embed_batch(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.network.controlnet_x_embedder(self._backbone.pack(images))
        return embedded

    @torch.inference_mode()
    def residuals(
        self, inputs: Inputs, embedded: Sequence[Tensor], union: UnionImages | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        state, (image,) = self._backbone.begin(inputs), embedded
        state.hidden = state.hidden + image
        if union is not None:
            # The mode is one more token before the prompt. It has the position that all tokens of the prompt share.
            state.context = torch.cat([self.network.controlnet_mode_embedder(union.modes), state.context], dim=1)
            assert state.rotary is not None
            cosines, sines = (torch.cat([angles[:1], angles]) for angles in state.rotary)
            state.rotary = cosines, sines
        projections = (*self.network.controlnet_blocks, *self.network.controlnet_single_blocks)
        for index, (block, projection) in enumerate(zip(self._backbone.blocks, projections, strict=True)):
            block.run(state)
            yield index, projection(state.hidden)


def _like_patches(tokens: Tensor) -> Tensor:
    """Return tokens in the memory layout that embedded patches have: the last bits of a sum depend on it."""
    return tokens.mT.contiguous().mT


class _RowByRow(nn.Module):
    """A transformer layer of a union that keeps the rows of a batch apart.

    Diffusers' layer takes the batch for the sequence, so that rows attend to each other. The two halves of guidance
    have equal rows here, for which that changes nothing, but rows of other requests would change the residuals.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor) -> Tensor:
        """Return the states after the layer, [rows, images and sample, features]."""
        after: Tensor = self.layer(states.reshape(1, -1, states.shape[-1]))
        return after.reshape(states.shape)


def find_controlnet(
    name: str, folder: Path, *, base: ControlLayout | None, dtype: torch.dtype | None, root: Path | None = None
) -> ControlNetSource:
    """Check a ControlNet by its configuration and file headers, without reading weights, and return it.

    Args:
        name: Name of the ControlNet, for errors.
        folder: Folder in Diffusers' layout.
        base: Layout of the model that it must fit; None if that is not known yet.
        dtype: Element type in which it will be loaded; None for that of its files.
        root: See ControlNetSource.

    Raises:
        InvalidRequest: Names the values of the configuration that are out of bounds.
        ControlNetUnusable: Says why it cannot be served or does not fit the base.
    """
    with _naming(name, "used"):
        config = read_checked_config(name, folder, base=base, root=root)
        with opened_weights(folder, root) as files:
            dtype = dtype or _weights_dtype(files)
            size_bytes = _weights_bytes(files, dtype)
    return ControlNetSource(
        name=name,
        folder=folder,
        root=root,
        dtype=dtype,
        size_bytes=size_bytes,
        layout=controlnet_layout(config),
        modes=config.modes,
    )


def check_weights(source: ControlNetSource) -> None:
    """Compare the network that the configuration describes with the headers of its files, without reading weights.

    Raises:
        InvalidRequest: Values of the configuration are out of bounds.
        ControlNetUnusable: Says what differs.
    """
    with _naming(source.name, "used"), opened_weights(source.folder, source.root) as files:
        _check_same(_built(read_checked_config(source.name, source.folder, root=source.root)), files)


def load_controlnet(source: ControlNetSource, device: torch.device) -> LoadedControlNet:
    """Load the weights. This may run in any thread, beside forward passes of other networks.

    Raises:
        ControlNetUnusable: The files have changed or are incomplete.
    """
    # from_pretrained would change the default element type of the whole process while it loads, unless it is float32,
    # and other threads' tensors would get that type.
    try:
        with _naming(source.name, "loaded"), opened_weights(source.folder, source.root) as files:
            config = read_checked_config(source.name, source.folder, root=source.root)
            found = controlnet_layout(config), config.modes, _weights_bytes(files, source.dtype)
            if found != (source.layout, source.modes, source.size_bytes):
                raise ValueError("its files have changed since they were checked; add it again")
            network = _built(config)
            _check_same(network, files)
            state = {
                entry.name: _read_tensor(weights, entry).to(device, source.dtype)
                for weights in files
                for entry in weights.header.tensors
            }
            network.load_state_dict(state, strict=True, assign=True)
    except InvalidRequest as error:
        raise ControlNetUnusable(error.message) from None
    _, loaded = _CLASSES[type(config)]
    return loaded(source, network.eval())


def _built(config: AnyNetworkConfig) -> Any:
    """Return the network without memory for weights. The meta device is set for this thread only."""
    network, _ = _CLASSES[type(config)]
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)  # Diffusers uses it itself.
        return network.from_config(config.fields)


_CLASSES: Mapping[type[AnyNetworkConfig], tuple[Any, Callable[[ControlNetSource, Any], LoadedControlNet]]] = {
    NetworkConfig: (ControlNetModel, UNetControlNet),
    UnionConfig: (ControlNetUnionModel, UNetControlNet),
    Sd3NetworkConfig: (SD3ControlNetModel, Sd3ControlNet),
    FluxNetworkConfig: (FluxControlNetModel, FluxControlNet),
}


def _check_same(network: nn.Module, files: Sequence[WeightsFile]) -> None:
    check_same({name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}, files)


@contextmanager
def _naming(name: str, what: str) -> Iterator[None]:
    """Convert errors about a ControlNet's files in the `with` block, also those of torch, to ControlNetUnusable."""
    with naming(name, what):
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(str(error)) from error


def _read_tensor(weights: WeightsFile, entry: TensorEntry) -> Tensor:
    """Return a copy of a tensor in the file.

    A mapped file could change, and would crash the process if it were truncated.
    """
    raw = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    weights.file.seek(weights.header.size_bytes + entry.begin)
    if weights.file.readinto(raw.numpy().data) < raw.numel():
        raise ValueError("a weights file was truncated while it was read")
    return raw.view(_DTYPES[entry.dtype]).reshape(entry.shape)


def _weights_dtype(files: Sequence[WeightsFile]) -> torch.dtype:
    """Return the most common element type of the tensors if it is float16 or bfloat16, else float32."""
    counts = Counter(entry.dtype for weights in files for entry in weights.header.tensors)
    common = counts.most_common(1)
    found = _DTYPES[common[0][0]] if common else torch.float32
    return found if found in {torch.float16, torch.bfloat16} else torch.float32


def _weights_bytes(files: Sequence[WeightsFile], dtype: torch.dtype) -> int:
    """Return the bytes of all tensors in the element type in which they are loaded."""
    entries = (entry for weights in files for entry in weights.header.tensors)
    return sum(math.prod(entry.shape) * dtype.itemsize for entry in entries)
