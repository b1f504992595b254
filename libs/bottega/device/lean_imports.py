"""Imports an engine's libraries: only those that it needs, and without garbage collection meanwhile."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

UNUSED = ("peft", "scipy")


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Import torch, transformers and Diffusers in this context, before anything else in the process imports them.

    From here on PEFT and SciPy cannot be imported, even if they are installed: Diffusers imports them at once if it
    finds them, which takes a second for each. The engine applies LoRAs itself, and has no sampler that needs SciPy.
    Source: the language reference, "The module cache": a module whose entry is None cannot be found.

    Without a CUDA device, Triton cannot be imported either. torch's compiler, which Diffusers imports, would import it,
    and its library takes 65 MiB.

    The libraries' objects live as long as the process, so they are exempt from later garbage collections. A collection
    of all of them takes a quarter of a second, in the middle of a step. Source: gc.freeze's documentation.
    """
    for unused in UNUSED:
        sys.modules[unused] = None  # type: ignore[assignment]  # Missing in its type annotations.
    gc.disable()
    try:
        _hide_triton()
        yield
    finally:
        gc.freeze()
        gc.enable()


def _hide_triton() -> None:
    """Keep Triton from being imported, unless there is a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # Missing in its type annotations.
