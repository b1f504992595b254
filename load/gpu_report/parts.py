"""What the report measures, part by part, in the order in which they run. It imports none of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from load.gpu_report.report import Figure
from load.gpu_report.rig import Rig

Measure = Callable[[Rig], Sequence[Figure]]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the report."""

    name: str
    """Of its file, and on the command line."""
    question: str
    measure: str
    """As "MODULE:FUNCTION", below this folder."""

    def load(self) -> Measure:
        """Import the function that measures."""
        module, _, function = self.measure.partition(":")
        measure: Measure = getattr(importlib.import_module(f"load.gpu_report.{module}"), function)
        return measure


PARTS: Sequence[Part] = (
    Part("device", "How fast does the device copy and multiply?", "device:measure"),
    Part("model", "What is measured with?", "random_model:measure"),
    Part("picture", "How long does a picture take, against Diffusers eager?", "pictures:alone"),
    Part("compiled", "And against Diffusers compiled?", "pictures:alone_compiled"),
    Part("batches", "What do several at once gain, against Diffusers eager?", "pictures:together"),
    Part("batches-compiled", "And against Diffusers compiled?", "pictures:together_compiled"),
    Part("tests", "Do the tests that need a GPU pass?", "commands:measure_tests"),
    Part("kernels", "How close are the kernels to float64, and how fast?", "commands:measure_kernels"),
    Part("loras", "How fast does a LoRA go in and out again?", "loras:measure"),
    Part("controlnets", "What do ControlNets cost a step, in this process?", "controlnets:measure"),
    Part("edits", "What do edits gain by the size of their mask?", "edits:measure"),
    Part("vae", "How fast is the VAE, and how close to float32?", "vae:measure"),
    Part(
        "suite",
        "What does the whole suite add, what do ControlNets on a server cost, and what does a cache hit save?",
        "suite:measure",
    ),
)
