"""Compiles every kernel for a GPU, which need not be there: `python -m tests.support.kernel_compiling`, without
TRITON_INTERPRET. All numbers that it may be launched with are 1: Triton compiles these in, and they are no tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bottega.kernels import geglu, group_norm_silu, guided_euler, lora_patch, tile_moves, token_moves

_H100 = GPUTarget("cuda", 90, 32)
_HALF, _FLOAT, _INT, _LONG = "*fp16", "*fp32", "*i32", "*i64"
_CUT = {"joined": True, "each": 2, "groups_at_once": 16, "block_g": 16, "block_c": 32, "block_s": 1}

Types = Mapping[str, str]
Constants = Mapping[str, Any]
# The kernel, types of tensors and of numbers that are never compiled in, and what its launches say.
_KERNELS: Sequence[tuple[Any, Types, Constants]] = (
    (group_norm_silu._sum_parts, {"x": _HALF, "means": _FLOAT, "squares": _FLOAT}, _CUT),
    (
        group_norm_silu._normalize,
        {**dict.fromkeys(("x", "out", "weight", "bias"), _HALF), "means": _FLOAT, "squares": _FLOAT, "eps": "fp32"},
        {**_CUT, "out_joined": True, "activate": True, "block_p": 64},
    ),
    (geglu._geglu, {"x": _HALF, "out": _HALF}, {"block": 1024}),
    *(
        (
            tile_moves._move,
            {"maps": _HALF, "tiles": _HALF, "corners": _INT},
            {"paste": paste, "block_s": 16, "block_c": 128},
        )
        for paste in (False, True)
    ),
    (token_moves._gather, {"whole": _HALF, "index": _LONG, "items": _HALF}, {"block_i": 16, "block_c": 128}),
    (
        token_moves._merge,
        {
            "items": _HALF,
            "slots": _INT,
            "whole": _HALF,
            "some_rest": _HALF,
            **{f"rest_{row}": "i64" for row in range(8)},  # addresses
        },
        {"block_i": 16, "block_c": 128},
    ),
    (
        lora_patch._patch,
        {"layers": _LONG, "first_tiles": _INT, "some_weight": _HALF},
        {"fields": 7, "halvings": 1, "aligned": True, "widen": False, "tile": 64, "block_r": 32},
    ),
    *(
        (
            guided_euler._step,
            {
                **dict.fromkeys(("conditional", "unconditional", "latent", "following"), _HALF),
                "estimate": _FLOAT,
                "scale": "fp32",
                "sigma": "fp32",
                "next_sigma": "fp32",
            },
            {"guided": True, "velocity": velocity, "block": 1024},
        )
        for velocity in (False, True)
    ),
)


def _compile(kernel: Any, types: Types, constants: Constants) -> None:
    said = {**dict.fromkeys(kernel.arg_names, 1), **constants}
    compiled_in = {name: value for name, value in said.items() if name not in types}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in compiled_in.items()}
    triton.compile(ASTSource(kernel, signature, places), target=_H100)


def main() -> int:
    """1 where one does not compile, which is printed."""
    failed = 0
    for kernel, types, constants in _KERNELS:
        try:
            _compile(kernel, types, constants)
        except Exception as error:  # noqa: BLE001 - whatever a compiler says: the others are tried, too
            print(f"{kernel.__name__}: {error}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
