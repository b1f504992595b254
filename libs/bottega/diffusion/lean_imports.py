"""How an engine process imports its libraries: only those that it needs, and without looking for garbage meanwhile.

Knows how Python finds modules and keeps objects, and nothing of the engine.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

UNUSED = ("peft", "scipy")
_COMPILER = "torch._dynamo"


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Torch, transformers and Diffusers are imported in this block, before anybody else of the process has them.

    PEFT and SciPy are not to be had from here on, even where they are installed: wherever Diffusers finds them, it
    imports them at once, which takes a second for each. The engine itself adds LoRAs to weights
    (bottega.diffusion.loras), and serves no sampler whose sigmas follow a distribution of SciPy's.
    Source: the language reference, "The module cache": a module whose entry is None cannot be found.

    What the libraries consist of stays for as long as the process, so it is left to no later search for garbage either:
    one through all of it takes a quarter of a second, in the middle of somebody's step. Source: gc.freeze's
    documentation.

    What torch.compile is made of is not imported either, before somebody compiles; see `_unmarked_for_compiler`.
    """
    for unused in UNUSED:
        sys.modules[unused] = None  # type: ignore[assignment]  # a gap in its types
    gc.disable()
    try:
        with _unmarked_for_compiler():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _unmarked_for_compiler() -> Iterator[None]:
    """Diffusers marks some of its code for torch.compile, which imports all of the compiler: a quarter of the imports.

    The marks (allow_in_graph on its blocks, disable on its hooks) say what to make of that code where it is called from
    compiled code. The engine compiles blocks, each as a whole, and uses none of the hooks.
    """
    if _COMPILER in sys.modules:
        yield
        return
    import torch.compiler

    disable = torch.compiler.disable
    torch.compiler.disable = _as_it_is
    sys.modules[_COMPILER] = None  # type: ignore[assignment]  # as above; Diffusers then goes without allow_in_graph
    try:
        yield
    finally:
        torch.compiler.disable = disable
        del sys.modules[_COMPILER]


def _as_it_is(fn: Any = None, *_: Any, **__: Any) -> Any:
    """Stands for torch.compiler.disable, with arguments or without."""
    return _as_it_is if fn is None else fn
