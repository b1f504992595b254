"""Assembles a module's tensors into its canonical parts: LoRA, LoHa, LoKr or a full difference, perhaps with DoRA.

LyCORIS' differences of normalisation layers are full differences of their weights and biases.

A module of the authors' code may be several modules in Diffusers, such as queries, keys and values. Each of these has
some of the outputs, so it gets some rows of `up`; all of them share `down`.

Source: PEFT's layers of the same names; LyCORIS' modules. LyCORIS' LoKr ignores alpha if both factors are whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from bottega.addons.loras.wire.canonical import ModuleWeights, TensorData
from bottega.addons.loras.wire.module_parts import (
    BIAS,
    DORA_SCALE,
    DOWN,
    DOWN2,
    FULL,
    KRON,
    MAGNITUDE,
    MAX_RANK,
    NORM,
    UP,
    UP2,
    magnitude_shapes,
)
from bottega.errors import BadLora
from bottega.loras.importing.arrays import (
    MAX_F32,
    check_bound,
    fitted,
    folded,
    largest,
    multiplied,
    pad_inputs,
    product_bound,
    read_number,
    read_weights,
    reshaped,
    rows_of,
    transposed,
)
from bottega.loras.importing.base import BaseModule
from bottega.loras.importing.naming import Format, Part
from bottega.loras.importing.peft_config import AdapterConfig
from bottega.safetensors_header import Header, TensorEntry

_KINDS: Mapping[str, frozenset[Part]] = {
    "factors of LoRA": frozenset({Part.DOWN, Part.UP, Part.MID}),
    "factors of LoHa": frozenset(part for part in Part if part.startswith("hada_")),
    "factors of LoKr": frozenset(part for part in Part if part.startswith("lokr_")),
    "full differences of weights": frozenset({Part.DIFF, Part.W_NORM}),
}
# Factors whose first dimension is the rank. A module has one of them, or LoKr's two, of which the first counts.
_RANKED = (Part.DOWN, Part.HADA_W1_B, Part.LOKR_W2_B, Part.LOKR_W1_B)
_PEFT = {"LORA": "factors of LoRA", "LOHA": "factors of LoHa", "LOKR": "factors of LoKr"}
_KIND_OF = {part: kind for kind, parts in _KINDS.items() for part in parts}


@dataclass(slots=True, kw_only=True, eq=False)
class ModuleParts:
    """The tensors for one module of the base model."""

    module: BaseModule
    config: AdapterConfig | None
    format: Format
    path: str
    """Path of the module in the trainer's network, which the patterns in PEFT's configuration match."""
    parts: dict[Part, tuple[BinaryIO, Header, TensorEntry]] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        """Rank of its factors; 0 if a factor has no rank, and None without low-rank factors."""
        for part in _RANKED:
            if part in self.parts:
                shape = self.shape(part)
                return shape[0] if shape else 0
        return None

    def shape(self, part: Part) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.parts[part][2].shape

    def read(self, part: Part) -> TensorData:
        """Return a tensor. Raises BadLora if it is missing, or has elements that are not finite."""
        return read_weights(*self.parts[part])


def assemble(found: ModuleParts) -> Iterator[ModuleWeights]:
    """Yield the canonical parts of a module, or of those of Diffusers' network that it stands for.

    Raises BadLora, which names the module, and OSError.
    """
    _check_norm(found)
    kind = _kind(found)
    rank = found.rank
    if rank == 0:
        part = next(part for part in _RANKED if part in found.parts)
        raise BadLora(f"{found.module.name}: {part.value} has the shape {list(found.shape(part))}, which has no rank")
    match kind:
        case "factors of LoRA":
            parts, bound = _lora(found)
        case "factors of LoHa":
            parts, bound = _loha(found)
        case "factors of LoKr":
            parts, bound = _lokr(found)
        case "full differences of weights":
            parts, bound = _full(found)
        case _:
            parts, bound = {}, 0.0
    scale = _scale(found, rank)
    check_bound(found.module, abs(scale) * bound)
    module, parts = found.module, {**parts, **_magnitude(found, bool(parts)), **_bias(found)}
    if not module.pieces:
        yield ModuleWeights(component=module.component, path=module.path, scale=scale, parts=parts)
    for piece in module.pieces:
        some = _of_rows(module, parts, piece.rows)
        yield ModuleWeights(component=module.component, path=piece.path, scale=scale, parts=some)


def _of_rows(
    module: BaseModule, parts: Mapping[str, TensorData], ranges: Sequence[tuple[int, int]]
) -> dict[str, TensorData]:
    """Return the parts of a change for some of a module's outputs.

    LoKr's first factor multiplies blocks of outputs, of which each is whole. Raises BadLora if it is not, and for norms
    over all outputs.
    """
    cut: dict[str, Sequence[tuple[int, int]]] = dict.fromkeys((UP, UP2, FULL, MAGNITUDE, BIAS), ranges)
    norms = parts.get(DORA_SCALE)
    if norms is not None and norms.shape[0] == module.shape[0]:
        cut[DORA_SCALE] = ranges
    elif norms is not None and len(module.pieces) > 1:
        raise BadLora(f"{module.name} has a dora_scale for each input, which cannot be divided among {_names(module)}")
    if KRON in parts:
        blocks = parts[KRON].shape[0]
        size = module.shape[0] // blocks
        if any(edge % size for bounds in ranges for edge in bounds):
            raise BadLora(
                f"{module.name} has factors of LoKr for several modules at once, {_names(module)}: the {blocks} rows "
                "of the first factor cannot be divided among them; train it with Diffusers' names of modules"
            )
        del cut[UP], cut[FULL]
        cut[KRON] = [(first // size, last // size) for first, last in ranges]
    return {name: rows_of(tensor, cut[name]) if name in cut else tensor for name, tensor in parts.items()}


def _names(module: BaseModule) -> str:
    return ", ".join(piece.path for piece in module.pieces)


def _kind(found: ModuleParts) -> str:
    """Return the kind of a module's change; "" if it changes only the bias."""
    kinds = {_KIND_OF[part]: found.parts[part][2].name for part in Part if part in found.parts and part in _KIND_OF}
    if len(kinds) > 1:
        listed = " and ".join(f"{kind} ({name})" for kind, name in kinds.items())
        raise BadLora(f"{found.module.name} has {listed}: save each in a file of its own")
    if not kinds and not found.parts.keys() & {Part.DIFF_B, Part.B_NORM}:
        lacking = next((part for part in (Part.MAGNITUDE, Part.DORA_SCALE) if part in found.parts), None)
        beside = f", beside its magnitudes of DoRA ({found.parts[lacking][2].name})" if lacking else ""
        raise BadLora(f"{found.module.name} lacks down and up{beside}")
    kind = next(iter(kinds), "")
    if found.config is not None and found.config.peft_type and kind not in {"", _PEFT[found.config.peft_type]}:
        where = f"{found.config.where} says peft_type {found.config.peft_type}"
        raise BadLora(f"{where}, but {found.module.name} has {kind}")
    return kind


def _check_norm(found: ModuleParts) -> None:
    """Raise BadLora for differences of a normalisation layer on another layer, and for others on such a layer."""
    norms = [found.parts[part][2].name for part in (Part.W_NORM, Part.B_NORM) if part in found.parts]
    if norms and not found.module.is_norm:
        raise BadLora(f"{norms[0]} is a difference of a normalisation layer, and {found.module.name} is another layer")
    factor = next((part for part in found.parts if part in _KIND_OF and part not in {Part.DIFF, Part.W_NORM}), None)
    if found.module.is_norm and factor is not None:
        raise BadLora(f"{found.module.name} is a normalisation layer, and cannot have {_KIND_OF[factor]}")
    for one, other in ((Part.DIFF, Part.W_NORM), (Part.DIFF_B, Part.B_NORM)):
        if one in found.parts and other in found.parts:
            names = " and ".join(found.parts[part][2].name for part in (one, other))
            raise BadLora(f"{names} are the same part of {found.module.name}")


def _require(found: ModuleParts, *parts: Part) -> None:
    missing = [part.value for part in parts if part not in found.parts]
    if missing:
        raise BadLora(f"{found.module.name} lacks {' and '.join(missing)}")


def _lora(found: ModuleParts) -> tuple[dict[str, TensorData], float]:
    _require(found, Part.DOWN, Part.UP)
    down, up = found.read(Part.DOWN), found.read(Part.UP)
    if Part.MID in found.parts:
        down = folded(found.module, down, found.read(Part.MID), ("lora_mid", "lora_down"))
    if found.module.extends_latent:
        down = _pad_to_module_inputs(found.module, down)
    down, up = fitted(found.module, down, up)
    return {DOWN: down, UP: up}, product_bound(down, up)


def _pad_to_module_inputs(module: BaseModule, down: TensorData) -> TensorData:
    """Pad a down factor to all inputs of a module. A LoRA for a model with fewer inputs has only the first ones.

    Source: FluxLoraLoaderMixin._maybe_expand_lora_state_dict, which Flux Fill needs for LoRAs of Flux dev.
    """
    read = module.shape[1]
    given = down.shape[1] if len(down.shape) == 2 else read
    if given > read:
        raise BadLora(
            f"{module.name} reads {read} values of each token, and the LoRA changes {given}: it is for a model that "
            "reads more, such as Flux.1 Fill or one with a control image; add it for that model"
        )
    return pad_inputs(down, read) if 0 < given < read else down


def _loha(found: ModuleParts) -> tuple[dict[str, TensorData], float]:
    _require(found, Part.HADA_W1_A, Part.HADA_W1_B, Part.HADA_W2_A, Part.HADA_W2_B)
    if (Part.HADA_T1 in found.parts) != (Part.HADA_T2 in found.parts):
        _require(found, Part.HADA_T1, Part.HADA_T2)
    down, up = _product(found, found.module, Part.HADA_W1_A, Part.HADA_W1_B, Part.HADA_T1)
    down2, up2 = _product(found, found.module, Part.HADA_W2_A, Part.HADA_W2_B, Part.HADA_T2)
    return {DOWN: down, UP: up, DOWN2: down2, UP2: up2}, product_bound(down, up) * product_bound(down2, up2)


def _lokr(found: ModuleParts) -> tuple[dict[str, TensorData], float]:
    first = _first_factor(found)
    outputs, inputs, *kernel = found.module.shape
    rows, columns = first.shape
    inner = replace(found.module, shape=(outputs // rows, inputs // columns, *kernel))
    bound = largest(first)
    if Part.LOKR_W2 in found.parts:
        second = found.read(Part.LOKR_W2)
        full = reshaped(second, inner.shape)
        if full is None:
            raise _misfit(found, first.shape, second.shape)
        return {KRON: first, FULL: full}, bound * largest(full)
    _require(found, Part.LOKR_W2_A, Part.LOKR_W2_B)
    down, up = _product(found, inner, Part.LOKR_W2_A, Part.LOKR_W2_B, Part.LOKR_T2)
    return {KRON: first, DOWN: down, UP: up}, bound * product_bound(down, up)


def _first_factor(found: ModuleParts) -> TensorData:
    """Return LoKr's first factor, [rows, columns], which divides the module's outputs and inputs."""
    outputs, inputs = found.module.shape[:2]
    if Part.LOKR_W1 in found.parts:
        shape = found.shape(Part.LOKR_W1)
    else:
        _require(found, Part.LOKR_W1_A, Part.LOKR_W1_B)
        left, right = found.shape(Part.LOKR_W1_A), found.shape(Part.LOKR_W1_B)
        if len(left) != 2 or len(right) != 2 or left[1] != right[0] or not 0 < left[1] <= MAX_RANK:
            raise _misfit(found, left, right)
        shape = (left[0], right[1])
    if len(shape) != 2 or 0 in shape or outputs % shape[0] or inputs % shape[1]:
        raise _misfit(found, shape)
    if Part.LOKR_W1 in found.parts:
        return found.read(Part.LOKR_W1)
    return multiplied(found.module, found.read(Part.LOKR_W1_A), found.read(Part.LOKR_W1_B))


def _misfit(found: ModuleParts, *shapes: tuple[int, ...]) -> BadLora:
    listed = " and ".join(str(list(shape)) for shape in shapes)
    return BadLora(
        f"{found.module.name} has the shape {list(found.module.shape)} in the base model; "
        f"its factors of LoKr, {listed}, do not fit it"
    )


def _product(
    found: ModuleParts, module: BaseModule, left: Part, right: Part, middle: Part
) -> tuple[TensorData, TensorData]:
    """Return a low-rank product of LoHa or LoKr as `down` and `up`.

    Args:
        found: The tensors.
        module: The module, with the shape of the product.
        left: [out, rank]; with a middle factor, [rank, out].
        right: [rank, in], or [rank, in * height * width] for a convolution.
        middle: Part of the middle factor, [rank, rank, height, width], which may be missing.
    """
    up, down = found.read(left), found.read(right)
    if len(up.shape) != 2 or len(down.shape) != 2:
        raise BadLora(f"{found.module.name}: {left.value} and {right.value} are not matrices")
    if middle in found.parts:
        return fitted(module, folded(module, down, found.read(middle), (middle, right)), transposed(up))
    unfolded = (down.shape[0], *module.shape[1:])
    if down.shape[1] == math.prod(module.shape[1:]):
        down = TensorData(dtype=down.dtype, shape=unfolded, data=down.data)
    return fitted(module, down, up)


def _full(found: ModuleParts) -> tuple[dict[str, TensorData], float]:
    if Part.ALPHA in found.parts:
        raise BadLora(f"{found.module.name} has a full difference and an alpha, which has no meaning there")
    weights = found.read(Part.DIFF if Part.DIFF in found.parts else Part.W_NORM)
    full = reshaped(weights, found.module.shape)
    if full is None:
        raise BadLora(
            f"{found.module.name} has the shape {list(found.module.shape)} in the base model; "
            f"its full difference, {list(weights.shape)}, does not fit it"
        )
    return {NORM if found.module.is_norm else FULL: full}, largest(full)


def _magnitude(found: ModuleParts, has_change: bool) -> dict[str, TensorData]:
    """Return the magnitudes of DoRA: at most one of PEFT's and LyCORIS'."""
    parts = [part for part in (Part.MAGNITUDE, Part.DORA_SCALE) if part in found.parts]
    if found.config is not None and found.config.use_dora and not parts:
        raise BadLora(f"{found.config.where} sets use_dora, but {found.module.name} has no magnitudes of DoRA")
    if not parts:
        return {}
    if len(parts) > 1 or not has_change:
        raise BadLora(f"{found.module.name} has magnitudes of DoRA twice, or without factors")
    weights, shapes = found.read(parts[0]), magnitude_shapes(found.module.shape)
    name = found.parts[parts[0]][2].name
    if parts == [Part.MAGNITUDE]:
        if math.prod(weights.shape) == shapes[0][0] and max(weights.shape) == shapes[0][0]:
            return {MAGNITUDE: TensorData(dtype=weights.dtype, shape=shapes[0], data=weights.data)}
    else:
        for shape in shapes:
            if (same := reshaped(weights, shape)) is not None:
                return {DORA_SCALE: same}
    raise BadLora(
        f"{found.module.name} has the shape {list(found.module.shape)} in the base model; "
        f"the magnitudes of DoRA in {name}, {list(weights.shape)}, do not fit it"
    )


def _bias(found: ModuleParts) -> dict[str, TensorData]:
    part = next((part for part in (Part.DIFF_B, Part.B_NORM) if part in found.parts), None)
    if part is None:
        return {}
    weights, name = found.read(part), found.parts[part][2].name
    if not found.module.has_bias:
        raise BadLora(
            f"{name} is one of the full differences of weights for a bias, which {found.module.name} does not have"
        )
    if weights.shape != found.module.shape[:1]:
        raise BadLora(f"{name} has the shape {list(weights.shape)}; the bias has {found.module.shape[0]} elements")
    return {BIAS: weights}


def _scale(found: ModuleParts, rank: int | None) -> float:
    """Return alpha divided by rank. Raises BadLora, which names the module, if F32 cannot hold it."""
    scale = _stated_scale(found, rank)
    if not abs(scale) <= MAX_F32:
        raise BadLora(f"{found.module.name}: its alpha over its rank is {scale:.3g}, beyond the range of F32")
    return scale


def _stated_scale(found: ModuleParts, rank: int | None) -> float:
    if found.config is not None and _KIND_OF.keys() & found.parts.keys():
        if rank is not None:
            found.config.check_rank(found.module.name, found.path, rank)
        elif (rank := found.config.stated_rank(found.path)) is None:
            raise BadLora(f"{found.module.name} has no rank, and {found.config.where} does not say one")
        return found.config.scale(found.path, rank)
    if Part.ALPHA in found.parts:
        alpha = read_number(*found.parts[Part.ALPHA])
        return alpha / rank if rank is not None else 1.0
    if found.format is Format.PEFT:
        raise BadLora("the file is PEFT's, whose alpha is in adapter_config.json: upload the folder that has both")
    return 1.0
