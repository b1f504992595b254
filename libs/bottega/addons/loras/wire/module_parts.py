"""The tensors of one module in a canonical file: which of them go together, and the weight that they change."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from bottega.errors import BadLora
from bottega.safetensors_header import TensorEntry

CLIP_ENCODERS = ("text_encoder", "text_encoder_2")
TEXT_ENCODERS = (*CLIP_ENCODERS, "text_encoder_3")
"""Parts that read prompts. The third is T5."""
DENOISERS = ("transformer", "unet")
"""Parts that are denoising networks; a model has one of them."""
COMPONENTS = (*TEXT_ENCODERS, *DENOISERS)
"""Parts that a LoRA may change."""
DTYPES = frozenset({"F32", "F16", "BF16"})
# LoRAs that were extracted from fine-tuned models have ranks of some hundreds. Higher ranks save hardly anything.
MAX_RANK = 512
SCALE, DOWN, UP, DOWN2, UP2, FULL, KRON = "scale", "down", "up", "down2", "up2", "full", "kron"
MAGNITUDE, DORA_SCALE, NORM, BIAS = "magnitude", "dora_scale", "norm", "bias"
TOKEN_EMBEDDING, VECTORS = "token_embedding", "vectors"
PARTS = (SCALE, DOWN, UP, DOWN2, UP2, FULL, KRON, MAGNITUDE, DORA_SCALE, NORM, BIAS, VECTORS)
# Vectors of an embedding. A prompt that is not divided into chunks has room for 75 tokens.
MAX_VECTORS = 75
PLAIN = frozenset({SCALE, DOWN, UP})
# The parts that together are the change of a weight.
_KINDS = frozenset(
    frozenset(kind)
    for kind in ((), (DOWN, UP), (DOWN, UP, DOWN2, UP2), (FULL,), (KRON, FULL), (KRON, DOWN, UP), (NORM,))
)


def is_low_rank(parts: Collection[str]) -> bool:
    """Return whether a module's parts are the factors of one low-rank product, perhaps with a bias."""
    return {part for part in parts if part != BIAS} == PLAIN


def weight_shape(shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...] | None:
    """Return the shape of the weight that a module's parts change; None if they change only a bias.

    Args:
        shapes: Shapes by part, which match each other.
    """
    if NORM in shapes:
        return tuple(shapes[NORM])
    if FULL in shapes:
        inner = tuple(shapes[FULL])
    elif DOWN in shapes:
        inner = (shapes[UP][0], *shapes[DOWN][1:])
    else:
        return None
    rows, columns = shapes.get(KRON, (1, 1))
    return (rows * inner[0], columns * inner[1], *inner[2:])


def magnitude_shapes(shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that norms of a weight may have: a norm for each output, or for each input."""
    ones = (1,) * (len(shape) - 2)
    return (shape[0], 1, *ones), (1, shape[1], *ones)


def check_vectors(component: str, path: str, parts: Mapping[str, TensorEntry]) -> None:
    """Refuse an embedding in another place than a text encoder's tokens, or with too many vectors."""
    if component not in CLIP_ENCODERS or path != TOKEN_EMBEDDING or parts.keys() != {SCALE, VECTORS}:
        refuse(f"{component}.{path[:80]} has vectors, which only {TOKEN_EMBEDDING} of a text encoder may have")
    shape = parts[VECTORS].shape
    if len(shape) != 2 or shape[0] > MAX_VECTORS:
        refuse(f"vectors has the shape {list(shape)}; at most [{MAX_VECTORS}, features] is accepted")


def check_parts(name: str, parts: Mapping[str, TensorEntry]) -> None:
    """Refuse a module whose parts are not those of one kind of change."""
    kind = frozenset(parts) - {SCALE, BIAS, MAGNITUDE, DORA_SCALE}
    if SCALE in parts and kind in _KINDS and (kind or parts.keys() == {SCALE, BIAS}):
        if not {MAGNITUDE, DORA_SCALE} <= parts.keys():
            if NORM in parts and not parts.keys() <= {SCALE, NORM, BIAS}:
                refuse(f"{name} is a normalisation layer with norms of its weight")
            return
        refuse(f"{name} has both {MAGNITUDE} and {DORA_SCALE}")
    wanted = next((known for known in sorted(_KINDS, key=len) if kind and kind < known), frozenset({DOWN, UP}))
    lacking = [part for part in PARTS if part in wanted | {SCALE} and part not in parts]
    refuse(f"{name} lacks {', '.join(lacking)}" if lacking else f"{name} has parts that do not go together")


def check_shapes(name: str, parts: Mapping[str, TensorEntry]) -> None:
    """Refuse a module with elements or shapes that no part may have, or that do not go together."""
    if (parts[SCALE].dtype, parts[SCALE].shape) != ("F32", ()):
        refuse(f"the scale of {name} is not a single F32")
    for part, entry in parts.items():
        if part != SCALE and entry.dtype not in DTYPES:
            refuse(f"{name} has elements that are none of {', '.join(sorted(DTYPES))}")
        if 0 in entry.shape:
            refuse(f"{part} of {name} has the shape {list(entry.shape)}, which has no elements")
    for down, up in ((DOWN, UP), (DOWN2, UP2)):
        if down in parts:
            _check_product(name, parts[down], parts[up])
    if FULL in parts and len(parts[FULL].shape) not in {2, 4}:
        refuse(f"full of {name} has the shape {list(parts[FULL].shape)}; [out, in] or a convolution's is accepted")
    if NORM in parts and len(parts[NORM].shape) != 1:
        refuse(f"norm of {name} has the shape {list(parts[NORM].shape)}; [channels] is accepted")
    if KRON in parts and len(parts[KRON].shape) != 2:
        refuse(f"kron of {name} has the shape {list(parts[KRON].shape)}; [rows, columns] is accepted")
    _check_weight(name, {part: entry.shape for part, entry in parts.items()})


def _check_weight(name: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse parts that do not change the same weight."""
    if VECTORS in shapes:
        return
    shape = weight_shape(shapes)
    if DOWN2 in shapes and shape != weight_shape({DOWN: shapes[DOWN2], UP: shapes[UP2]}):
        refuse(f"{name} has two products of different shapes")
    outputs = shape[0] if shape else math.prod(shapes[BIAS])
    if BIAS in shapes and shapes[BIAS] != (outputs,):
        refuse(f"bias of {name} has the shape {list(shapes[BIAS])}, not [{outputs}]")
    for part in (MAGNITUDE, DORA_SCALE):
        if part in shapes and shapes[part] not in magnitude_shapes(shape or ())[: 1 if part == MAGNITUDE else 2]:
            refuse(f"{part} of {name} has the shape {list(shapes[part])}, which does not fit {list(shape or ())}")


def _check_product(name: str, down: TensorEntry, up: TensorEntry) -> None:
    if len(down.shape) not in {2, 4}:
        refuse(f"down of {name} has the shape {list(down.shape)}; [rank, in] or a convolution's is accepted")
    rank = down.shape[0]
    if rank > MAX_RANK:
        refuse(f"{name} has rank {rank}; at most {MAX_RANK} is accepted")
    if up.shape[1:] != (rank, *(1 for _ in down.shape[2:])):
        refuse(f"up of {name} has the shape {list(up.shape)}, which does not follow down's, {list(down.shape)}")


def refuse(what: str) -> NoReturn:
    """Raise BadLora with what is wrong with a canonical file."""
    raise BadLora(f"the file is no LoRA in canonical form: {what}")
