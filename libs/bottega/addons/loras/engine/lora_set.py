"""Combines the LoRAs of one request into one set of factors, here or at the other worker of a pair.

The sum of B A over several LoRAs is one product of wider factors, with every scale folded in, so a request costs the
same however its rank is divided among LoRAs. Both merging and computing beside the weights start from such a set.

In half precision that product rounds differently from PEFT, which stock Diffusers uses: PEFT computes one product after
the other and rounds each of them, its scaling and the sum. Sets made `as_peft` keep each LoRA's factors and scale
separate, in order ("terms"), so that the same roundings can be made.

LoRAs without a low-rank form become differences of whole weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from bottega.addons.loras.engine.lora import NORMS, LoraAtScale, LoraLayer, WholeLayer, weight_difference
from bottega.addons.loras.wire.canonical import spellings
from bottega.addons.loras.wire.module_parts import BIAS, weight_shape
from bottega.device.device import run_pieces
from bottega.engine.addon import JobAddOn
from bottega.engine.parallel.remote_rows import OffloadedPart
from bottega.engine.spec import LoraSpec
from bottega.errors import LoraUnusable
from bottega.model.rows import Difference, Factors, LoraSet, Row, SetKey, Term

if TYPE_CHECKING:
    from bottega.addons.loras.engine.job_loras import JobLoras


def make_set(
    uses: Sequence[LoraAtScale],
    networks: Mapping[str, nn.Module],
    components: Sequence[str],
    *,
    as_peft: bool = False,
    original: Callable[[str, str], Tensor] | None = None,
) -> LoraSet:
    """Return the result of `make_set_in_pieces` at once."""
    return run_pieces(make_set_in_pieces(uses, networks, components, as_peft=as_peft, original=original))


def make_set_in_pieces(
    uses: Sequence[LoraAtScale],
    networks: Mapping[str, nn.Module],
    components: Sequence[str],
    *,
    as_peft: bool = False,
    original: Callable[[str, str], Tensor] | None = None,
) -> Generator[None, None, LoraSet]:
    """Return the changes of these components, by the paths of the networks' own modules.

    Yields after each difference of a whole weight. For all of SD 1.5's they take a CPU 8 s.

    A text encoder's layer may be named with or without `text_model.`, whichever the network has.

    Args:
        uses: The LoRAs of a request.
        networks: Networks by component; their weights are not changed.
        components: Components to make changes for.
        as_peft: Keep the LoRAs separate, so that products can be computed one by one.
        original: Returns the weight of a component's module without LoRAs; None if none are merged into the networks.

    Raises:
        LoraUnusable: A layer has no module that it fits.
    """
    ordered = _ordered(uses, as_peft=as_peft)
    factors: dict[str, dict[str, Factors]] = {}
    differences: dict[str, dict[str, Difference]] = {}
    for name in components:
        changes = list(_module_changes(ordered, name, networks[name]))
        factors[name] = {
            change.path: _separate(change.low_rank, change.weight)
            if as_peft
            else _joined(change.low_rank, change.weight)
            for change in changes
            if change.low_rank
        }
        differences[name] = {}
        for change in changes:
            if change.has_difference:
                weight = original(name, change.path) if original else change.weight
                differences[name][change.path] = _difference(change, weight)
                yield
    changes_norms = any(
        isinstance(networks[name].get_submodule(path), NORMS) for name in components for path in differences[name]
    )
    key = set_key(uses, as_peft=as_peft)
    return LoraSet(key=key, components=factors, differences=differences, changes_norms=changes_norms)


def expanded_bytes(uses: Sequence[LoraAtScale], network: nn.Module, component: str) -> int:
    """Return the bytes of the differences that these LoRAs add to a network. Raise LoraUnusable."""
    total = 0
    for change in _module_changes(uses, component, network):
        weight = change.weight
        total += weight.nbytes if change.whole else 0
        total += weight.shape[0] * weight.element_size() if change.biases else 0
    return total


def set_key(uses: Sequence[LoraAtScale], *, as_peft: bool = False) -> SetKey:
    """Return the key of the set that `make_set` makes of these LoRAs."""
    return tuple((use.digest, use.scale) for use in _ordered(uses, as_peft=as_peft))


def _ordered(uses: Sequence[LoraAtScale], *, as_peft: bool) -> Sequence[LoraAtScale]:
    return uses if as_peft else sorted(uses, key=lambda use: (use.digest, use.scale))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ModuleChange:
    """The change of one module by the LoRAs of a request."""

    path: str
    weight: Tensor
    low_rank: list[tuple[LoraLayer, float]]
    """Layers with low-rank factors, each with all its scales."""
    whole: list[tuple[WholeLayer, float]]
    """Other layers, each with the scale of the request."""
    biases: list[tuple[Tensor, float]]
    """Changes of the bias, each with the scale of the request."""

    @property
    def has_difference(self) -> bool:
        return bool(self.whole or self.biases)


def _module_changes(uses: Sequence[LoraAtScale], component: str, network: nn.Module) -> Iterator[_ModuleChange]:
    layers_of_uses = [(use, use.layers.get(component, {})) for use in uses]
    modules = dict(network.named_modules()) if any(layers for _, layers in layers_of_uses) else {}
    found: dict[str, list[tuple[LoraLayer | WholeLayer, float]]] = {}
    for use, named in layers_of_uses:
        for name, layer in named.items():
            path = next((path for path in spellings(component, name) if path in modules), name)
            found.setdefault(path, []).append((layer, use.scale))
    for path, layers in found.items():
        module = _module(modules.get(path), f"{component}.{path}")
        for layer, _ in layers:
            for why in _misfits(layer, module):
                raise LoraUnusable(f"a LoRA does not fit {component}.{path}: {why}; add it for this model")
        yield _ModuleChange(
            path=path,
            weight=module.weight,
            low_rank=[(layer, scale * layer.scale) for layer, scale in layers if isinstance(layer, LoraLayer)],
            whole=[(layer, scale) for layer, scale in layers if isinstance(layer, WholeLayer)],
            biases=[(bias, scale) for layer, scale in layers if (bias := _bias(layer)) is not None],
        )


_Module = nn.Linear | nn.Conv2d | nn.LayerNorm | nn.GroupNorm


def _module(module: nn.Module | None, path: str) -> _Module:
    if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
        return module
    if isinstance(module, NORMS) and module.weight is not None:
        return module
    raise LoraUnusable(
        f"the model has no linear, plain convolution or normalisation layer {path}, which a LoRA changes; add it for "
        "this model"
    )


def _bias(layer: LoraLayer | WholeLayer) -> Tensor | None:
    return layer.bias if isinstance(layer, LoraLayer) else layer.parts.get(BIAS)


def _misfits(layer: LoraLayer | WholeLayer, module: _Module) -> Iterator[str]:
    """Yield the reasons why a layer cannot be added to a module."""
    weight, bias = module.weight, _bias(layer)
    if bias is not None and (module.bias is None or bias.shape != module.bias.shape):
        yield f"it changes a bias of {len(bias)} values, which the module does not have"
    if isinstance(layer, WholeLayer):
        shape = weight_shape({part: tensor.shape for part, tensor in layer.parts.items()})
        if shape is not None and shape != tuple(weight.shape):
            yield f"it changes a weight of the shape {shape}, and the weight has {tuple(weight.shape)}"
        return
    rank = layer.down.shape[0]
    if layer.down.shape[1:] != weight.shape[1:]:
        yield f"down has the shape {tuple(layer.down.shape)}, and the weight {tuple(weight.shape)}"
    if isinstance(module, NORMS):
        yield "it is a normalisation layer"
    elif tuple(layer.up.shape) != (weight.shape[0], rank, *[1] * (weight.ndim - 2)):
        yield f"up has the shape {tuple(layer.up.shape)} with rank {rank}, and the weight {tuple(weight.shape)}"


def _difference(change: _ModuleChange, original: Tensor) -> Difference:
    """Sum the layers without a low-rank form in single precision, and round once."""
    weight = change.weight
    with torch.no_grad():
        added = [
            difference.to(weight.device)
            for layer, scale in change.whole
            if (difference := weight_difference(layer, scale, original.to(weight.device))) is not None
        ]
        biases = [scale * bias.to(weight.device, torch.float32) for bias, scale in change.biases]
        return Difference(weight=_rounded_sum(added, weight.dtype), bias=_rounded_sum(biases, weight.dtype))


def _rounded_sum(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    if not tensors:
        return None
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total.to(dtype)


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


class RemoteLoras(JobAddOn):
    """The LoRAs of another worker's job, which this worker has fetched itself."""

    def __init__(self, loras: JobLoras) -> None:
        self._loras = loras

    def ready(self, now_s: float) -> bool:
        self._loras.update(now_s)
        return self._loras.loras is not None

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
