"""LoRAs for tests: random ones as PEFT makes them, stock pipelines that use them, a source that is told what comes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor, nn

from bottega.addons.loras.engine import Layers, LoraHandle, LoraLayer, LoraRef
from bottega.addons.loras.wire.module_parts import CLIP_ENCODERS
from bottega.engine.spans import StoreWork
from bottega.engine.spec import LoraSpec
from bottega.errors import BottegaError, Unavailable
from bottega.miniature import WEIGHTS
from bottega.model_files.family_names import UNET
from bottega.v1.fleet_pb2 import ServiceAddress
from tests.support.stock import load_stock, said

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TEXT = ["q_proj", "v_proj", "out_proj", "fc1"]

# What three LoRAs change: by component, as PEFT is told. Ranks and alphas are mixed, some within one LoRA.
STYLES: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "outline": {UNET: {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION}},
    "pastel": {
        UNET: {
            "r": 8,
            "lora_alpha": 4,
            "target_modules": [
                *ATTENTION,
                "ff.net.0.proj",
                "ff.net.2",
                "conv1",
                "conv_shortcut",
                "downsamplers.0.conv",
            ],
            "rank_pattern": {"to_q": 3, "conv1": 5},
            "alpha_pattern": {"to_q": 7, "ff.net.2": 1},
        },
        "text_encoder": {"r": 4, "lora_alpha": 6, "target_modules": TEXT},
        "text_encoder_2": {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "k_proj"]},
    },
    "pixel": {
        UNET: {
            "r": 16,
            "lora_alpha": 16,
            "target_modules": ["ff.net.2", "proj_in", "time_emb_proj", "upsamplers.0.conv"],
        },
        "text_encoder_2": {"r": 4, "lora_alpha": 1, "target_modules": TEXT},
    },
}

Components = Mapping[str, Layers]


def styled_stock(
    folder: Path = WEIGHTS, dtype: torch.dtype = torch.float32
) -> tuple[StableDiffusionXLPipeline, dict[str, Components]]:
    """Return stock Diffusers with all three as inactive PEFT adapters, and the adapters' layers."""
    from peft import LoraConfig  # takes long to import, which few tests need

    pipeline = load_stock(folder, dtype)
    components: dict[str, dict[str, Layers]] = {name: {} for name in STYLES}
    for seed, (name, style) in enumerate(STYLES.items()):
        for component, options in style.items():
            network = getattr(pipeline, component)
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")  # PEFT: several are meant
                torch.manual_seed(seed)
                network.add_adapter(LoraConfig(**options, init_lora_weights=False), adapter_name=name)
                _shrink(network, name)
            components[name][component] = layers_of(network, name)
    use(pipeline, {})
    return pipeline, dict(components)


def _shrink(network: nn.Module, name: str) -> None:
    """Weak enough that three together still draw something."""
    for path, parameter in network.named_parameters():
        if path.endswith(f"lora_B.{name}.weight"):
            parameter.data.mul_(0.3)


def layers_of(network: nn.Module, name: str) -> dict[str, LoraLayer]:
    """What PEFT added, in the canonical form."""
    layers = {}
    for path, module in network.named_modules():
        if hasattr(module, "lora_A") and name in module.lora_A:
            down, up = module.lora_A[name].weight.detach().clone(), module.lora_B[name].weight.detach().clone()
            layers[path] = LoraLayer(down=down, up=up, scale=module.scaling[name])
    assert layers
    return layers


def use(pipeline: Any, scales: Mapping[str, float], components: Sequence[str] = (UNET, *CLIP_ENCODERS)) -> None:
    """Makes the pipeline use these adapters at these scales, in these components, and no others."""
    for component in components:
        names = [name for name in scales if component in STYLES[name]]
        for module in getattr(pipeline, component).modules():
            if hasattr(module, "lora_A"):
                module.enable_adapters(bool(names))
                mine = [name for name in names if name in module.lora_A]
                module.set_adapter(mine)
                for name in mine:
                    module.set_scale(name, scales[name])


def styled_latent(pipeline: Any, spec: Any, scales: Mapping[str, float], from_step: int = 0, **options: Any) -> Tensor:
    """What stock makes of a spec with these LoRAs, in force in the UNet from a step on."""
    use(pipeline, scales)
    if from_step:
        use(pipeline, {}, [UNET])

    def switch(_: Any, done: int, __: Any, kept: dict[str, Tensor]) -> dict[str, Tensor]:
        if done == from_step - 1:
            use(pipeline, scales, [UNET])
        return kept

    generator = torch.Generator("cpu").manual_seed(spec.seed)
    out = pipeline(**said(spec), **options, generator=generator, output_type="latent", callback_on_step_end=switch)
    use(pipeline, {})
    latent: Tensor = out.images
    return latent


def random_layers(
    network: nn.Module, seed: int, *, rank: int = 4, targets: Sequence[str] = ATTENTION
) -> dict[str, LoraLayer]:
    """Layers for all modules whose path ends so."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for path, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and path.endswith(tuple(targets)):
            out, *rest = module.weight.shape
            down = torch.randn(rank, *rest, generator=generator) * 0.1
            up = torch.randn(out, rank, *[1] * (len(rest) - 1), generator=generator) * 0.1
            layers[path] = LoraLayer(down=down, up=up, scale=0.5)
    assert layers
    return layers


def digest_of(name: str) -> str:
    """Of a LoRA in these tests."""
    return hashlib.sha256(name.encode()).hexdigest()


def lora_spec(name: str, scale: float = 1.0, **options: Any) -> LoraSpec:
    return LoraSpec(name=name, digest=digest_of(name), scale=scale, **options)


@dataclass(eq=False)
class _Handle:
    source: LorasByHand
    ref: LoraRef
    closed: bool = False

    @property
    def text_ready(self) -> bool:
        return self.source.comes(self.ref, self.source.text)

    @property
    def ready(self) -> bool:
        return self.source.comes(self.ref, self.source.here)

    @property
    def load_s(self) -> float:
        return 1.25

    @property
    def work(self) -> StoreWork | None:
        return self.source.works.get(self.ref.name)

    @property
    def ignored(self) -> int:
        return 0

    def layers(self, component: str) -> Layers:
        assert not self.closed
        layers = self.source.loras[self.ref.digest].get(component, {})
        # Memory that is only lent: whoever reads it after `close` reads something else.
        return {
            path: replace(each, down=each.down.clone(), up=each.up.clone()) if isinstance(each, LoraLayer) else each
            for path, each in layers.items()
        }


@dataclass(eq=False)
class LorasByHand:
    """A LoraSource. loras: by digest. text, here: names whose text part, or all, has come; failed: what will not.
    works: what a store has done, by name.
    """

    loras: Mapping[str, Components]
    text: set[str] = field(default_factory=set)
    here: set[str] = field(default_factory=set)
    failed: dict[str, BottegaError] = field(default_factory=dict)
    works: dict[str, StoreWork] = field(default_factory=dict)
    open: list[LoraHandle] = field(default_factory=list)
    settled: int = 0

    @classmethod
    def of(cls, components: Mapping[str, Components], *, here: bool = True) -> LorasByHand:
        """All of these by name, here or not."""
        names = set(components) if here else set()
        return cls({digest_of(name): each for name, each in components.items()}, text=set(names), here=set(names))

    def come(self, *names: str) -> None:
        self.text |= set(names)
        self.here |= set(names)

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """It needs none."""

    def begin(self, ref: LoraRef) -> LoraHandle:
        handle = _Handle(self, ref)
        self.open.append(handle)
        return handle

    def settle(self, handles: Sequence[LoraHandle], timeout_s: float) -> None:
        assert handles
        self.settled += 1

    def close(self, handles: Sequence[LoraHandle]) -> None:
        for handle in handles:
            assert isinstance(handle, _Handle)
            handle.closed = True
            if handle in self.open:
                self.open.remove(handle)

    def comes(self, ref: LoraRef, names: set[str]) -> bool:
        if ref.name in self.failed:
            raise self.failed[ref.name]
        return ref.name in names


STORE_DOWN = Unavailable("the LoRA store cannot be reached")
