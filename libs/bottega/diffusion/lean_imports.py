"""How an engine process imports its libraries: only those that it needs, and without looking for garbage meanwhile.

Knows how Python finds modules and keeps objects, and nothing of the engine.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Torch, transformers and Diffusers are imported in this block, before anybody else of the process has them.

    PEFT is not to be had from here on, even where it is installed: wherever Diffusers finds it, it imports it at once,
    which takes a second, and the engine itself adds LoRAs to weights (bottega.diffusion.loras). Source: the language
    reference, "The module cache": a module whose entry is None cannot be found.

    What the libraries consist of stays for as long as the process, so it is left to no later search for garbage either:
    one through all of it takes a quarter of a second, in the middle of somebody's step. Source: gc.freeze's
    documentation.
    """
    sys.modules["peft"] = None  # type: ignore[assignment]  # a gap in its types
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
