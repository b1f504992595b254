"""Whether what a model's blocks put out for a template follows the prompt: measured before recordings are relied on.

An edit takes the activations outside its mask from an edit with another prompt. That is right only where they hardly
depend on it. InstGenIE (2025) reports it for its models; here each model is measured once, on the first template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bottega.diffusion.editing.edit import Edit
from bottega.diffusion.engine.encode import Conditions, encode_prompts
from bottega.diffusion.engine.forward import stack
from bottega.diffusion.model.model import Model
from bottega.diffusion.rows import Embeds, Half, Row
from bottega.diffusion.spec import ResolvedSpec

# Of the cosine of blocks' outputs under two prompts, on average over tokens and blocks. The embedded model has .75 to
# .9. There edits that took both halves from another prompt's recording had an SSIM of .994 with the full one (of 12),
# those that took only the half without the prompt .998 (12), and those of a prompt and thing that was recorded .9998.
LEAST_COSINE = 0.95

# A prompt that has nothing in common with what people ask for in edits.
PROBE_PROMPT = "an empty blackboard in a classroom at night"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCosines:
    """By block."""

    cosines: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Over all blocks; 1 where there is none."""
        return sum(self.cosines.values()) / len(self.cosines) if self.cosines else 1.0

    @property
    def reliable(self) -> bool:
        """Whether an edit may use what another prompt's edit has recorded."""
        return self.mean >= LEAST_COSINE


@torch.inference_mode()
def measure_prompts(
    model: Model, spec: ResolvedSpec, conditions: Conditions, edit: Edit, blocks: Sequence[str]
) -> PromptCosines:
    """Compares what blocks put out for an edit's template with its own prompt and with another one.

    Both see the image with the noise of the middle of the steps. blocks: paths of modules.
    """
    step = (spec.begin_step + spec.num_inference_steps) // 2
    sampler = model.samplers.open(spec.sampling, steps=spec.num_inference_steps, begin=step)
    noisy = sampler.add_noise(edit.image_latent, edit.noise, step)
    sample, timestep = sampler.model_input(noisy, step)[0], sampler.timestep(step)
    probe = encode_prompts(model, _probe(spec)).conditional

    def row(embeds: Embeds) -> Row:
        return Row(owner=None, step=step, half=Half.CONDITIONAL, sample=sample, timestep=timestep, embeds=embeds)

    return _compare(model, [row(conditions.conditional), row(probe)], blocks)


def _probe(spec: ResolvedSpec) -> ResolvedSpec:
    return ResolvedSpec(prompt=PROBE_PROMPT, width=spec.width, height=spec.height, guidance_scale=1.0)


def _compare(model: Model, rows: Sequence[Row], blocks: Sequence[str]) -> PromptCosines:
    outputs: dict[str, Tensor] = {}
    with _watched(model.backbone.unet, blocks, outputs):
        activations = model.backbone.begin(stack(rows))
        for block in model.backbone.blocks:
            block.run(activations)
    compared = {name: functional.cosine_similarity(first, second, dim=-1) for name, (first, second) in outputs.items()}
    return PromptCosines(cosines={name: float(cosine.mean()) for name, cosine in compared.items()})


@contextmanager
def _watched(network: nn.Module, names: Sequence[str], outputs: dict[str, Tensor]) -> Iterator[None]:
    """Keeps what these modules put out, [rows, tokens, channels], with what it is added to."""

    def keep(name: str) -> Callable[[nn.Module, object, tuple[Tensor] | Tensor], None]:
        def hook(_module: nn.Module, _inputs: object, output: tuple[Tensor] | Tensor) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
            outputs[name] = (tensor if tensor.ndim == 3 else tensor.flatten(2).transpose(1, 2)).float()

        return hook

    # A projection out of a transformer is added to what came in: that is what the next layer reads.
    handles = [
        network.get_submodule(name.removesuffix(".proj_out")).register_forward_hook(keep(name)) for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
