"""How an engine process imports its libraries: only those that it needs, and without looking for garbage meanwhile.

Knows how Python finds modules and keeps objects, and nothing of the engine.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

UNUSED = ("peft", "scipy")


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
    """
    for unused in UNUSED:
        sys.modules[unused] = None  # type: ignore[assignment]  # a gap in its types
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
