"""Reads the tensors of a LoRA's file as arrays, checks that they are finite, reshapes them and folds convolutions.

numpy has no bfloat16. Such tensors stay 16-bit words unless a computation needs their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from bottega.addons.loras.wire.canonical import TensorData
from bottega.addons.loras.wire.module_parts import DTYPES, MAX_RANK
from bottega.errors import BadLora
from bottega.loras.importing.base import BaseModule
from bottega.safetensors_header import Header, TensorEntry

MAX_F32 = float(np.finfo(np.float32).max)
_NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "BF16": "<u2"}
_BF16_EXPONENT = 0x7F80
_BF16_MAGNITUDE = 0x7FFF


def read_number(file: BinaryIO, header: Header, entry: TensorEntry) -> float:
    """Return the value of a tensor with one element. Raises BadLora for any other tensor."""
    if entry.dtype not in _NUMPY or entry.shape not in {(), (1,), (1, 1)}:
        raise BadLora(f"{entry.name} is not a single number: {entry.dtype}{list(entry.shape)}")
    number = float(_computable(_words(file, header, entry), entry.dtype).reshape(-1)[0])
    if not np.isfinite(number):
        raise BadLora(f"{entry.name} is not finite")
    return number


def read_weights(file: BinaryIO, header: Header, entry: TensorEntry) -> TensorData:
    """Return a tensor of weights. Raises BadLora if its type is not supported or an element is not finite."""
    if entry.dtype not in DTYPES:
        raise BadLora(f"{entry.name} has elements of {entry.dtype}; {', '.join(sorted(DTYPES))} are supported")
    words = _words(file, header, entry)
    if entry.dtype == "BF16":
        finite = bool(((words.view(np.uint16) & _BF16_EXPONENT) != _BF16_EXPONENT).all())
    else:
        finite = bool(np.isfinite(words).all())
    if not finite:
        raise BadLora(f"{entry.name} has elements that are not finite (NaN or infinity)")
    return TensorData(dtype=entry.dtype, shape=entry.shape, data=words.tobytes())


def folded(module: BaseModule, down: TensorData, mid: TensorData, names: tuple[str, str]) -> TensorData:
    """Multiply two convolutions into one: `down`, [rank, in] or [rank, in, 1, 1], and `mid`, [rank, rank, ...].

    The product is computed in float64 and stored as F32. Raises BadLora, which names the module, if the rank is too
    high, the shapes do not match or F32 cannot hold the product. `names` are those of `mid` and `down`.
    """
    rank = down.shape[0]
    _check_rank(module, rank)
    if len(down.shape) < 2 or down.shape[2:] not in {(), (1, 1)} or mid.shape[:2] != (rank, rank):
        shapes = f"{list(mid.shape)}, which does not fit that of {names[1]}, {list(down.shape)}"
        raise BadLora(f"{module.name}: the middle factor ({names[0]}) has the shape {shapes}")
    if len(mid.shape) != 4 or mid.shape[2:] != (module.shape[2:] or (1, 1)):
        kernel = f"{list(mid.shape)}, and the base model's weight {list(module.shape)}: they do not fit"
        raise BadLora(f"{module.name}: the middle factor ({names[0]}) has the shape {kernel}")
    first = _array(down).astype(np.float64).reshape(rank, -1)
    both = np.tensordot(_array(mid).astype(np.float64), first, axes=(1, 0))
    return _as_f32(module, np.moveaxis(both, 3, 1), " and ".join(names))


def multiplied(module: BaseModule, up: TensorData, down: TensorData) -> TensorData:
    """Return the product of two matrices, of which the shapes match. Raises BadLora if F32 cannot hold it."""
    both = _array(up).astype(np.float64) @ _array(down).astype(np.float64)
    return _as_f32(module, both, "lokr_w1_a and lokr_w1_b")


def _as_f32(module: BaseModule, product: NDArray[np.float64], factors: str) -> TensorData:
    if not np.abs(product).max(initial=0.0) <= MAX_F32:
        raise BadLora(f"{module.name}: the product of {factors} is beyond the range of F32")
    return TensorData(dtype="F32", shape=product.shape, data=product.astype("<f4").tobytes())


def transposed(matrix: TensorData) -> TensorData:
    """Return the transpose of a matrix."""
    words = np.frombuffer(matrix.data, dtype=_NUMPY[matrix.dtype]).reshape(matrix.shape)
    return TensorData(dtype=matrix.dtype, shape=matrix.shape[::-1], data=np.ascontiguousarray(words.T).tobytes())


def pad_inputs(down: TensorData, inputs: int) -> TensorData:
    """Return a LoRA down factor, [rank, fewer inputs], padded with zero columns to [rank, inputs]."""
    words = np.frombuffer(down.data, dtype=_NUMPY[down.dtype]).reshape(down.shape)
    wide = np.pad(words, [(0, 0), (0, inputs - down.shape[1])])
    return TensorData(dtype=down.dtype, shape=wide.shape, data=wide.tobytes())


def rows_of(weights: TensorData, ranges: Sequence[tuple[int, int]]) -> TensorData:
    """Return the slices of a tensor's first dimension that have their indexes in these ranges, in their order."""
    words = np.frombuffer(weights.data, dtype=_NUMPY[weights.dtype]).reshape(weights.shape)
    rows = np.concatenate([words[first:last] for first, last in ranges])
    return TensorData(dtype=weights.dtype, shape=rows.shape, data=rows.tobytes())


def largest(weights: TensorData) -> float:
    """Return the largest magnitude of an element."""
    return float(_largest(weights, axis=1).max())


def product_bound(down: TensorData, up: TensorData) -> float:
    """Return an upper bound on the elements of `up @ down`, computed from the largest element of each rank.

    Computing the product itself takes as long as patching. The bound is far above the values that trainers write.
    """
    return float(_largest(up, axis=0) @ _largest(down, axis=1))


def check_bound(module: BaseModule, bound: float) -> None:
    """Raise BadLora, which names the module, if its change may exceed the range of F32."""
    if not bound <= MAX_F32:
        raise BadLora(f"{module.name}: alpha / rank * up @ down may reach {bound:.3g}, beyond the range of F32")


def fitted(module: BaseModule, down: TensorData, up: TensorData) -> tuple[TensorData, TensorData]:
    """Return `down` and `up` in the shapes that the module needs. Raises BadLora if they do not fit the module.

    Files may write a 1x1 convolution as a matrix, or a matrix as a 1x1 convolution.
    """
    rank = down.shape[0] if down.shape else 0
    _check_rank(module, rank)
    outputs, inputs, *kernel = module.shape
    ones = [1] * len(kernel)
    shaped_down = reshaped(down, [rank, inputs, *kernel])
    shaped_up = reshaped(up, [outputs, rank, *ones])
    if rank == 0 or shaped_down is None or shaped_up is None:
        raise BadLora(
            f"{module.name} has the shape {list(module.shape)} in the base model; "
            f"down, {list(down.shape)}, and up, {list(up.shape)}, do not fit it"
        )
    return shaped_down, shaped_up


def _check_rank(module: BaseModule, rank: int) -> None:
    if rank > MAX_RANK:
        raise BadLora(f"{module.name} has rank {rank}; the maximum is {MAX_RANK}")


def reshaped(weights: TensorData, shape: Sequence[int]) -> TensorData | None:
    """Return weights with another shape, or None if the shapes differ in more than trailing ones."""
    if _stripped(weights.shape) != _stripped(shape):
        return None
    return TensorData(dtype=weights.dtype, shape=tuple(shape), data=weights.data)


def _stripped(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[:2]) if all(extent == 1 for extent in shape[2:]) else tuple(shape)


def _largest(weights: TensorData, *, axis: int) -> NDArray[np.float64]:
    """Return the largest magnitude in each row (axis 1) or column (axis 0).

    Copies at most one array of the weights' own type, because the process's memory is limited.
    """
    words = np.frombuffer(weights.data, dtype=_NUMPY[weights.dtype]).reshape(weights.shape[0], -1)
    if weights.dtype == "BF16":  # without their signs, the words are ordered as integers are
        return _computable((words & _BF16_MAGNITUDE).max(axis=axis), "BF16").astype(np.float64)
    largest: NDArray[np.floating] = np.maximum(words.max(axis=axis), -words.min(axis=axis))
    return largest.astype(np.float64)


def _array(weights: TensorData) -> NDArray[np.floating]:
    words = np.frombuffer(weights.data, dtype=_NUMPY[weights.dtype]).reshape(weights.shape)
    return _computable(words, weights.dtype)


def _computable(words: NDArray[np.generic], dtype: str) -> NDArray[np.floating]:
    if dtype == "BF16":  # the upper half of a float32
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.astype(np.float64) if dtype in {"F64", "I64", "I32"} else words.view(_NUMPY[dtype])


def _words(file: BinaryIO, header: Header, entry: TensorEntry) -> NDArray[np.generic]:
    file.seek(header.size_bytes + entry.begin)
    data = file.read(entry.end - entry.begin)
    if len(data) < entry.end - entry.begin:
        raise BadLora("the file became shorter while it was read")
    return np.frombuffer(data, dtype=_NUMPY[entry.dtype]).reshape(entry.shape)
