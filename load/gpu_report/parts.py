"""What the report measures, part by part, in the order in which they run. It imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from load.gpu_report.figures import Figure
from load.gpu_report.rig import Rig

Measure = Callable[[Rig], Sequence[Figure]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """name: of its file and on the command line. question: that it answers. measure: "MODULE:FUNCTION"."""

    name: str
    question: str
    measure: str

    def load(self) -> Measure:
        """Imports it."""
        module, _, function = self.measure.partition(":")
        measure: Measure = getattr(importlib.import_module(module), function)
        return measure


def _part(name: str, question: str, measure: str) -> Part:
    return Part(name=name, question=question, measure=f"load.gpu_report.{measure}")


PARTS: Sequence[Part] = (
    _part("device", "How fast does the device copy and multiply?", "device:measure"),
    _part("model", "What is measured with?", "random_model:measure"),
    _part("picture", "How long does a picture take, against Diffusers eager?", "pictures:alone"),
    _part("compiled", "And against Diffusers compiled?", "pictures:alone_compiled"),
    _part("batches", "What do several at once gain, against Diffusers eager?", "pictures:together"),
    _part("batches-compiled", "And against Diffusers compiled?", "pictures:together_compiled"),
    _part("tests", "Do the tests that need a GPU pass?", "gpu_tests:measure"),
    _part("kernels", "How close are the kernels to float64, and how fast?", "kernels:measure"),
    _part("loras", "How fast does a LoRA go in and out again?", "loras:measure"),
    _part("controlnets", "What do ControlNets cost a step, in this process?", "controlnets:measure"),
    _part("edits", "What do edits gain by the size of their mask?", "edits:measure"),
    _part("vae", "How fast is the VAE, and how close to float32?", "vae:measure"),
    _part(
        "suite",
        "What does the whole suite add, what do ControlNets on a server cost, and what does a cache hit save?",
        "suite:measure",
    ),
)
