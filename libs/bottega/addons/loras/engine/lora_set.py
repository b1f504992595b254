"""Combines the LoRAs of one request into one set of factors, here or at the other worker of a pair.

The sum of B A over several LoRAs is one product of wider factors, with every scale folded in, so a request costs the
same however its rank is divided among LoRAs. Both merging and computing beside the weights start from such a set.

In half precision that product rounds differently from PEFT, which stock Diffusers uses: PEFT computes one product after
the other and rounds each of them, its scaling and the sum. Sets made `as_peft` keep each LoRA's factors and scale
separate, in order ("terms"), so that the same roundings can be made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from bottega.addons.loras.engine.lora import LoraAtScale, LoraLayer
from bottega.addons.loras.wire.canonical import spellings
from bottega.engine.parallel.offload import OffloadedPart
from bottega.engine.spec import LoraSpec
from bottega.errors import LoraUnusable
from bottega.model.rows import Factors, LoraSet, Row, SetKey, Term

if TYPE_CHECKING:
    from bottega.addons.loras.engine.addon import JobLoras


def make_set(
    uses: Sequence[LoraAtScale],
    networks: Mapping[str, nn.Module],
    components: Sequence[str],
    *,
    as_peft: bool = False,
) -> LoraSet:
    """Return the factors for these components, by the paths of the networks' own modules.

    A text encoder's layer may be named with or without `text_model.`, whichever the network has.

    Args:
        uses: The LoRAs of a request.
        networks: Networks by component; their weights are not changed.
        components: Components to make factors for.
        as_peft: Keep the LoRAs separate, so that products can be computed one by one.

    Raises:
        LoraUnusable: A layer has no module that it fits.
    """
    ordered = _ordered(uses, as_peft=as_peft)
    made = {name: _factors(ordered, name, networks[name], as_peft=as_peft) for name in components}
    return LoraSet(key=set_key(uses, as_peft=as_peft), components=made)


def set_key(uses: Sequence[LoraAtScale], *, as_peft: bool = False) -> SetKey:
    """Return the key of the set that `make_set` makes of these LoRAs."""
    return tuple((use.digest, use.scale) for use in _ordered(uses, as_peft=as_peft))


def _ordered(uses: Sequence[LoraAtScale], *, as_peft: bool) -> Sequence[LoraAtScale]:
    return uses if as_peft else sorted(uses, key=lambda use: (use.digest, use.scale))


def _factors(uses: Sequence[LoraAtScale], component: str, network: nn.Module, *, as_peft: bool) -> dict[str, Factors]:
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
        made[path] = _separate(layers, weight) if as_peft else _joined(layers, weight)
    return made


def _weight(module: nn.Module | None, path: str) -> Tensor:
    if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
        return module.weight
    raise LoraUnusable(f"the model has no linear or plain convolution layer {path}, which a LoRA changes")


def _misfits(layer: LoraLayer, weight: Tensor) -> Iterator[str]:
    """Yield the reasons why a layer cannot be added to a weight."""
    rank = layer.down.shape[0]
    if layer.down.shape[1:] != weight.shape[1:]:
        yield f"down has the shape {tuple(layer.down.shape)}, and the weight {tuple(weight.shape)}"
    if tuple(layer.up.shape) != (weight.shape[0], rank, *[1] * (weight.ndim - 2)):
        yield f"up has the shape {tuple(layer.up.shape)} with rank {rank}, and the weight {tuple(weight.shape)}"


def _joined(layers: Sequence[tuple[LoraLayer, float]], weight: Tensor) -> Factors:
    downs = [layer.down.to(weight.device, weight.dtype, copy=True) for layer, _ in layers]
    # Scaled in single precision, and rounded only once to the model's element type.
    ups = [(layer.up.to(weight.device, torch.float32).flatten(1) * scale).to(weight.dtype) for layer, scale in layers]
    if len(layers) == 1:
        return Factors(down=downs[0], up=ups[0])
    return Factors(down=torch.cat(downs), up=torch.cat(ups, dim=1))


def _separate(layers: Sequence[tuple[LoraLayer, float]], weight: Tensor) -> Factors:
    downs = [layer.down.to(weight.device, weight.dtype, copy=True) for layer, _ in layers]
    ups = [layer.up.flatten(1).to(weight.device, weight.dtype, copy=True) for layer, _ in layers]
    return Factors(
        down=torch.cat(downs),
        up=torch.cat(ups, dim=1),
        terms=tuple(Term(rank=layer.down.shape[0], scale=scale) for layer, scale in layers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lora:
    """A LoRA of a job in the message, see LoraSpec. The first worker decides row by row from which step it is used."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    digest: Annotated[str, Field(max_length=128)]
    scale: Annotated[float, Field(allow_inf_nan=False)]


_LORAS = TypeAdapter(Annotated[tuple[_Lora, ...], Field(min_length=1, max_length=8)])


class RemoteLoras:
    """A RemoteAddOn: the LoRAs of another worker's job, which this worker has fetched itself."""

    def __init__(self, loras: JobLoras) -> None:
        self._loras = loras

    def ready(self, now_s: float) -> bool:
        self._loras.update(now_s)
        return not self._loras.waiting

    def activate(self, row: Row, active: int) -> Row:
        if active > 1 or (active and self._loras.loras is None):
            raise ValueError("a row has LoRAs that have not arrived")
        return replace(row, loras=self._loras.loras) if active else row

    def close(self) -> None:
        self._loras.close()


def loras_part(specs: Sequence[LoraSpec]) -> OffloadedPart:
    """Return the message about these LoRAs for the second worker."""
    messages = tuple(_Lora(name=spec.name, digest=spec.digest, scale=spec.scale) for spec in specs)
    return OffloadedPart(header=_LORAS.dump_json(messages))


def read_loras(part: OffloadedPart) -> tuple[LoraSpec, ...]:
    """Return the LoRAs in a message. Raise ValueError if it breaks a rule."""
    messages = _LORAS.validate_json(part.header)
    return tuple(LoraSpec(name=lora.name, digest=lora.digest, scale=lora.scale) for lora in messages)
