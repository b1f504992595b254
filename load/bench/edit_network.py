"""The network of the bench of edits alone, in a process of its own: what a forward takes, by what is recorded of it.

`python -m load.bench.edit_network --model FOLDER --threads N` answers one JSON line for each that it is given: a
ForwardAsk, or {} for the share of a forward that transformers take.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from load.bench.edit_model import EDIT_SHAPE, MARGIN, SIZE, TOKEN, square_mask
from load.bench.side_process import SideProcess, serve

if TYPE_CHECKING:
    from torch import Tensor

    from bottega.diffusion.engine.denoiser import Denoiser
    from bottega.diffusion.rows import Half, Row

# CLIP's.
_PROMPT_TOKENS = 77


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardAsk:
    """share: see EditAsk; 1 is the plain network. caching: outputs or keys_values."""

    share: float = 1.0
    caching: str = "outputs"
    sparse: bool = True


class Network(SideProcess):
    """The network's process, driven from here. Stop it (`with` does)."""

    def __init__(self, model: Path, threads: int) -> None:
        super().__init__("load.bench.edit_network", "--model", model, "--threads", threads, exclusive_cores=True)

    def forward_s(self, ask: ForwardAsk) -> float:
        """Seconds of one forward of a guided request's two rows."""
        return self.ask(asdict(ask))["seconds"]

    def transformer_share(self) -> float:
        """Of a plain forward's time."""
        return self.ask({})["share"]


class LoadedNetwork:
    """The network, and what was recorded of it so far."""

    def __init__(self, model: Path) -> None:
        import torch
        from diffusers import UNet2DConditionModel

        from bottega.diffusion.model.backbone import UNetBackbone
        from bottega.diffusion.rows import Half

        self._unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet", torch_dtype=torch.float32).eval()
        self._plain = UNetBackbone(self._unet)
        self._rows = [_row(self._unet.config, half) for half in Half]
        self._recorded: dict[tuple[str, bool], tuple[Denoiser, list[InMemory]]] = {}
        self._masks: dict[float, Tensor] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, float]:
        """To one line."""
        if not question:
            return {"share": self._transformer_share()}
        return {"seconds": self._forward_s(ForwardAsk(**question))}

    def _forward_s(self, ask: ForwardAsk) -> float:
        from bottega.addons.edits.engine.activations import EditActivations
        from bottega.diffusion.engine.denoiser import Denoiser
        from bottega.diffusion.engine.forward import Network

        if ask.share == 1.0:
            return Denoiser(Network(backbone=self._plain)).predict(self._rows).seconds
        denoiser, recordings = self._recordings(ask)
        # Masks stay the same tensors, as in an edit's steps.
        mask = self._masks.setdefault(ask.share, _computed(ask.share))
        edits = [EditActivations(computed=mask, recorded=recorded) for recorded in recordings]
        rows = [replace(row, activations=edit) for row, edit in zip(self._rows, edits, strict=True)]
        return denoiser.predict(rows).seconds

    def _recordings(self, ask: ForwardAsk) -> tuple[Denoiser, list[InMemory]]:
        from bottega.addons.edits.engine.activations import EditActivations
        from bottega.addons.edits.engine.masked.backbone import MaskedBackbone
        from bottega.addons.edits.engine.masked.feature_maps import FullMaps
        from bottega.addons.edits.engine.masked.transformer import Caching
        from bottega.addons.edits.engine.sparse import SparseMaps
        from bottega.diffusion.engine.denoiser import Denoiser
        from bottega.diffusion.engine.forward import Network

        name = (ask.caching, ask.sparse)
        if name not in self._recorded:
            maps = SparseMaps() if ask.sparse else FullMaps()
            backbone = MaskedBackbone(self._unet, caching=Caching(ask.caching), maps=maps)
            sinks = [InMemory() for _ in self._rows]
            edits = [EditActivations(sink=sink) for sink in sinks]
            denoiser = Denoiser(Network(backbone=self._plain, strategies=(backbone,)))
            denoiser.predict([replace(row, activations=edit) for row, edit in zip(self._rows, edits, strict=True)])
            self._recorded[name] = denoiser, sinks
        return self._recorded[name]

    def _transformer_share(self) -> float:
        from diffusers.models.transformers.transformer_2d import Transformer2DModel

        times: list[float] = []
        handles = []
        for module in self._unet.modules():
            if isinstance(module, Transformer2DModel):
                handles.append(module.register_forward_pre_hook(lambda *_: times.append(-perf_counter())))
                handles.append(module.register_forward_hook(lambda *_: times.append(perf_counter())))
        seconds = self._forward_s(ForwardAsk())
        for handle in handles:
            handle.remove()
        return sum(times) / seconds


class InMemory:
    """RecordedActivations of one row: all is here, and nobody asks what was taken."""

    projections = None
    reused: frozenset[str] = frozenset()
    waited_s = 0.0

    def __init__(self) -> None:
        self._outputs: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """What was put."""
        return self._outputs.get(name)

    def stored(self, name: str) -> Tensor | None:
        """The same."""
        return self._outputs.get(name)

    def put(self, name: str, output: Tensor) -> None:
        """Keeps a copy."""
        self._outputs[name] = output.half()


def _row(config: Any, half: Half) -> Row:
    """With random inputs, of the sizes that the network has."""
    import torch

    from bottega.diffusion.rows import Embeds, Row

    generator = torch.Generator().manual_seed(half.value)
    # Pooled text and six sizes make up what the added embedding takes.
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    embeds = Embeds(
        prompt=torch.randn(_PROMPT_TOKENS, config.cross_attention_dim, generator=generator),
        pooled=torch.randn(pooled, generator=generator),
        time_ids=torch.zeros(6),
    )
    sample = torch.randn(config.in_channels, config.sample_size, config.sample_size, generator=generator)
    return Row(owner=0, step=0, half=half, sample=sample, timestep=torch.tensor(501.0), embeds=embeds)


def _computed(share: float) -> Tensor:
    """The map of latent elements that an edit with this mask computes."""
    import torch

    from bottega.addons.edits.engine.masked.tokens import dilate

    pixels = SIZE // EDIT_SHAPE.sample_size
    mask = torch.from_numpy(square_mask(share) > 0)[::pixels, ::pixels]
    return dilate(mask, MARGIN, TOKEN // pixels)


def main() -> None:
    """Loads the network, says so with a line, then answers every line of stdin."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m load.bench.edit_network", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    serve(LoadedNetwork(options.model).answer)


if __name__ == "__main__":
    main()
