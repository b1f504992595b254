"""Measures how much the outputs of a model's blocks depend on the prompt, before an edit relies on a recording.

An edit reuses activations outside its mask that were computed with another prompt. That is right only if they hardly
depend on the prompt. InstGenIE (2025) reports this for its models; here each model is measured once, on its first
template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from bottega.engine.encode import Conditions, encode_prompts
from bottega.engine.forward import stack
from bottega.engine.latent_step import Edit
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row

# Lower bound on the mean cosine of block outputs under two prompts; the embedded model has .75 to .9. SSIM with the
# fully computed edit there (12 edits each): .994 if both halves reuse another prompt's recording, .998 if only the half
# without the prompt does, .9998 if prompt and subject are those of the recording.
LEAST_COSINE = 0.95

# A prompt unlike any that users give to edits.
PROBE_PROMPT = "an empty blackboard in a classroom at night"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCosines:
    """Cosine between block outputs under two prompts, as the mean over tokens, by block."""

    cosines: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Mean over all blocks; 1 if there are none."""
        return sum(self.cosines.values()) / len(self.cosines) if self.cosines else 1.0

    @property
    def reliable(self) -> bool:
        """Whether an edit may reuse activations that were recorded with another prompt."""
        return self.mean >= LEAST_COSINE


@torch.inference_mode()
def measure_prompts(
    model: Model, spec: ResolvedSpec, conditions: Conditions, edit: Edit, blocks: Sequence[str]
) -> PromptCosines:
    """Compare the outputs of blocks for an edit's template under the edit's prompt and under `PROBE_PROMPT`.

    Both rows see the image with the noise of the middle step. `blocks` are module paths.
    """
    middle = (spec.begin_step + spec.num_inference_steps) // 2
    sampler = model.samplers.open(spec.sampling, steps=spec.num_inference_steps, begin=middle)
    step = sampler.first_evaluation
    noisy = sampler.add_noise(edit.image_latent, edit.noise, step)
    sample, timestep = sampler.model_input(noisy, step)[0], sampler.timestep(step)
    probe = encode_prompts(model, _probe(spec)).conditional
    # As long as a prompt of several chunks. Attention to states that are repeated equals attention to them once.
    repeats = len(conditions.conditional.prompt) // len(probe.prompt)
    probe = replace(probe, prompt=probe.prompt.repeat(repeats, 1))

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
    """Collect the outputs of these modules, [rows, tokens, channels], during the `with` block."""

    def keep(name: str) -> Callable[[nn.Module, object, tuple[Tensor] | Tensor], None]:
        def hook(_module: nn.Module, _inputs: object, output: tuple[Tensor] | Tensor) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
            outputs[name] = (tensor if tensor.ndim == 3 else tensor.flatten(2).transpose(1, 2)).float()

        return hook

    # The output projection of a transformer is added to the transformer's input, and the next layer reads the sum. So
    # the hook is on the transformer.
    handles = [
        network.get_submodule(name.removesuffix(".proj_out")).register_forward_hook(keep(name)) for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
