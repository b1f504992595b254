"""The LoRAs of one request as one: by module, their factors side by side with every scale folded in.

The sum of B A over several LoRAs is one product of wider factors, so a request costs the same however its rank is
divided. Side path and patching both start from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bottega.diffusion.loras.lora import LoraAtScale, LoraLayer
from bottega.diffusion.rows import Factors, LoraSet, SetKey
from bottega.errors import LoraUnusable
from bottega.lora.canonical import spellings


def make_set(uses: Sequence[LoraAtScale], networks: Mapping[str, nn.Module], components: Sequence[str]) -> LoraSet:
    """Return the factors of these components, by the paths that the networks' own modules have.

    A text encoder's layer may be named with or without `text_model.`, whichever the network has.

    Args:
        uses: The LoRAs of a request.
        networks: By component; their weights are not touched.
        components: Which of them to make factors for.

    Raises:
        LoraUnusable: A layer has no module that it fits.
    """
    ordered = sorted(uses, key=lambda use: (use.digest, use.scale))
    made = {name: _factors(ordered, name, networks[name]) for name in components}
    return LoraSet(key=set_key([(use.digest, use.scale) for use in uses]), components=made)


def set_key(uses: Sequence[tuple[str, float]]) -> SetKey:
    """Of LoRAs by digest and scale, in any order."""
    return tuple(sorted(uses))


def _factors(uses: Sequence[LoraAtScale], component: str, network: nn.Module) -> dict[str, Factors]:
    layers_of_uses = [(use, use.layers.get(component, {})) for use in uses]
    modules = dict(network.named_modules()) if any(layers for _, layers in layers_of_uses) else {}
    terms: dict[str, list[tuple[LoraLayer, float]]] = {}
    for use, named in layers_of_uses:
        for name, layer in named.items():
            path = next((path for path in spellings(component, name) if path in modules), name)
            terms.setdefault(path, []).append((layer, use.scale * layer.scale))
    made = {}
    for path, layers in terms.items():
        weight = _weight(modules.get(path), f"{component}.{path}")
        for layer, _ in layers:
            for why in _misfits(layer, weight):
                raise LoraUnusable(f"a LoRA does not fit {component}.{path}: {why}")
        made[path] = _joined(layers, weight)
    return made


def _weight(module: nn.Module | None, path: str) -> Tensor:
    if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
        return module.weight
    raise LoraUnusable(f"the model has no linear or plain convolution layer {path}, which a LoRA changes")


def _misfits(layer: LoraLayer, weight: Tensor) -> Iterator[str]:
    """Why a layer cannot be added to this weight."""
    rank = layer.down.shape[0]
    if layer.down.shape[1:] != weight.shape[1:]:
        yield f"down is {tuple(layer.down.shape)}, and the weight {tuple(weight.shape)}"
    if tuple(layer.up.shape) != (weight.shape[0], rank, *[1] * (weight.ndim - 2)):
        yield f"up is {tuple(layer.up.shape)} with rank {rank}, and the weight {tuple(weight.shape)}"


def _joined(layers: Sequence[tuple[LoraLayer, float]], weight: Tensor) -> Factors:
    downs = [layer.down.to(weight.device, weight.dtype, copy=True) for layer, _ in layers]
    # Scaled in single precision and rounded once, whatever the model's element type.
    ups = [(layer.up.to(weight.device, torch.float32).flatten(1) * scale).to(weight.dtype) for layer, scale in layers]
    if len(layers) == 1:
        return Factors(down=downs[0], up=ups[0])
    return Factors(down=torch.cat(downs), up=torch.cat(ups, dim=1))
