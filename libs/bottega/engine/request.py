"""One image that is being denoised: its latent, sampler and generator, which change with every step.

A job of several images has several requests, which share their conditions. A request may join a batch at any step. It
knows what the requests of a batch must have in common (`key`), but not which others there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bottega.engine.encode import Conditions, LatentDistribution, Sources, cfg_scale, to_latent
from bottega.engine.latent_step import Edit, Guidance, RequestState, guided_step, make_edit
from bottega.engine.spec import ControlSpec, ResolvedSpec
from bottega.model.model import Model
from bottega.model.rows import GroupKey, Half, ImageActivations, LoraSet, Row, SetKey
from bottega.model.samplers import Sampler
from bottega.model.step_cache import StepCaches
from bottega.model.vae import encode_dtype
from bottega.planning import control_steps

# Number of training timesteps in flow matching.
_TRAINING_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveControl:
    """A ControlNet of a request, and when it is active."""

    handle: Hashable
    """Identifies its session at the provider of residuals."""
    first: int
    """First evaluation in which it is active."""
    last: int
    """Evaluation after the last one in which it is active."""
    halves: frozenset[Half] = frozenset(Half)
    """The halves of guidance that it controls."""


class Request:
    """A request to denoise one image of a job.

    A step is what the caller counts. Some samplers evaluate the network several times in a step; see `Sampler`. The
    engine runs one evaluation at a time, and a checkpoint may be made between two of one step.

    Args:
        index: Index of the image in the job; it is drawn with the spec's seed + index.
        sources: The picture that it starts from; None for text-to-image.
        resume: State to continue from; only the mask of `sources` is read then.
        alone: Whether its rows are always computed together, and without others.
    """

    def __init__(
        self,
        model: Model,
        spec: ResolvedSpec,
        conditions: Conditions,
        *,
        index: int = 0,
        sources: Sources | None = None,
        resume: RequestState | None = None,
        alone: bool = False,
    ) -> None:
        self.index = index
        self.alone = alone
        self.spec = spec
        self.begin = spec.begin_step
        """The first step; image-to-image starts later than 0."""
        self.controls: tuple[ActiveControl, ...] = ()
        """ControlNets, in the order in which their residuals are summed. Add-ons set this and the next three."""
        self.loras: LoraSet | None = None
        """LoRAs from step `loras_from` on; None if there are none, or they have not arrived."""
        self.loras_from: int | None = None
        self.activations: ImageActivations | None = None
        """Reads or writes recorded activations of the image; None if it has none."""
        self.edit: Edit | None = None
        sources = sources or Sources()
        self.sources_finite = [source.finite for source in (sources.image, sources.masked_image) if source is not None]
        """Whether each encoded source has neither NaN nor infinity."""
        # The mask and the masked image that an inpainting model reads beside the latent; None for other models.
        self.image: Tensor | None = None
        self._step_caches = StepCaches(enabled=spec.step_caching and spec.edit is None and model.unet is None)
        self.model = model
        self._conditions = conditions
        self._sampler = self._new_sampler(self.begin)
        self.first_evaluation, self.last_evaluation = self._sampler.first_evaluation, self._sampler.evaluations
        """The request is done when `evaluation`, the next one to run, equals the latter."""
        # On the CPU whatever the device is, so that a seed gives the same picture everywhere.
        self._generator = torch.Generator("cpu")
        self.control_noise = self._seed()
        """Noise for the latent of each control image, [1, channels, height, width]; empty if latents are means."""
        if resume is None:
            self.evaluation, self.latent = self.first_evaluation, self._start(sources).to(model.latent_dtype)
        else:
            self.evaluation = resume.evaluation
            self.latent = model.runtime.to_device(resume.latent, model.latent_dtype)
            self.edit = self._resumed_edit(resume, sources.mask)
            self._generator.set_state(resume.generator)
            self._step_caches.restore(resume.step_caches, lambda each: model.runtime.to_device(each, model.dtype))
            self._sampler.restore(resume.sampler, resume.evaluation, model.device)
        self.resumed_from = self.step
        """The step of its checkpoint; `begin` without one."""
        self.estimate = self.latent
        """The last evaluation's estimate of the finished latent. Like `latent`, [1, channels, height, width]."""
        self.key = GroupKey(shape=self._shape[1:], tokens=conditions.conditional.tokens, dtype=model.dtype)

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.spec.num_inference_steps

    @property
    def done(self) -> bool:
        """Whether the latent is finished."""
        return self.evaluation >= self.last_evaluation

    @property
    def step(self) -> int:
        """The step that the next evaluation belongs to, which is the number of finished steps; `end` when done."""
        return self._sampler.step_of(self.evaluation)

    @property
    def between_steps(self) -> bool:
        """Whether no step is half made."""
        return self._sampler.evaluation_of(self.step) == self.evaluation

    @property
    def next_step(self) -> int:
        """The first step of which no evaluation has been made."""
        return self.step if self.between_steps else self.step + 1

    @property
    def begun(self) -> bool:
        """Whether any evaluation has been made."""
        return self.evaluation > self.first_evaluation

    @property
    def loras_now(self) -> LoraSet | None:
        """The LoRAs that are active in the current step; None for none."""
        return self.loras if self.loras_from is not None and self.step >= self.loras_from else None

    @property
    def halves(self) -> tuple[Half, ...]:
        """The halves, conditional or unconditional, that the next evaluation computes."""
        over = False
        if self.spec.cfg_truncation < 1.0 and not self.done:
            # Time runs from 0 (noise) to 1 (picture), as in ZImagePipeline.
            time = (_TRAINING_STEPS - self._sampler.timestep(self.evaluation)) / _TRAINING_STEPS
            over = float(time) > self.spec.cfg_truncation
        return (Half.CONDITIONAL,) if over or self._conditions.unconditional is None else tuple(Half)

    @property
    def row_count(self) -> int:
        """Number of its rows in each forward pass."""
        return len(self.halves)

    @property
    def packs(self) -> bool:
        """Whether it may share a forward pass with requests of other sizes: recordings are read and made by size."""
        return self.activations is None

    @property
    def computed_share(self) -> float:
        """Fraction of its rows' tokens that the next evaluation computes."""
        return 1.0 if self.activations is None else self.activations.next_share

    @property
    def steps(self) -> int:
        """Number of all its steps."""
        return self.end - self.begin

    @property
    def evaluations(self) -> int:
        """Number of all its evaluations."""
        return self.last_evaluation - self.first_evaluation

    @property
    def evaluations_left(self) -> int:
        return self.last_evaluation - self.evaluation

    def share_weights(self, key: SetKey) -> bool:
        """Record which LoRAs the engine's weights contain. Return whether that changes the request's group key."""
        changed = self.key.weights != key
        if changed:
            self.key = replace(self.key, weights=key)
        return changed

    def timestep_of(self, evaluation: int) -> float:
        return float(self._sampler.timestep(evaluation))

    def noise_level_of(self, evaluation: int) -> float:
        """Return the noise level of its latent before an evaluation; see `Sampler.noise_level`."""
        return self._sampler.noise_level(evaluation)

    def signal_of(self, evaluation: int) -> float:
        """Return the factor of the picture in its latent before an evaluation; see `Sampler.signal`."""
        return self._sampler.signal(evaluation)

    @property
    def noise_levels(self) -> list[float]:
        """Noise levels of all its evaluations, from the first one on."""
        return [self.noise_level_of(place) for place in range(self.first_evaluation, self.last_evaluation)]

    def control_window(self, control: ControlSpec) -> tuple[int, int]:
        """Return the evaluations [first, last) in which a ControlNet is active, by shares of those that run."""
        start, end = control.control_guidance_start, control.control_guidance_end
        first, last = control_steps(start, end, self.evaluations)
        return self.first_evaluation + first, self.first_evaluation + last

    def control_steps(self, control: ControlSpec) -> tuple[int, int]:
        """Return the steps [first, last) in which a ControlNet is active, in all of their evaluations or in some."""
        first, last = self.control_window(control)
        begin = self._sampler.step_of(first)
        return begin, self._sampler.step_of(last - 1) + 1 if last > first else begin

    def use_edit(self, edit: Edit) -> None:
        """Continue with another image latent, noise or trajectory.

        Before the first step, the latent is computed again from them. Later they only affect the part outside the mask.
        """
        self.edit = edit
        if not self.begun:
            started = edit.start(self._sampler, self.first_evaluation, self._strength)
            self.latent = self.estimate = started.to(self.latent.dtype)

    def first_step_from(self, steps: int) -> int:
        """Return the next step if this request starts from the latent that another picture had after `steps` steps."""
        return self.model.samplers.first_step_from(self.spec.sampler, steps)

    def start_from(self, latent: Tensor, steps: int) -> None:
        """Continue from the latent that another picture had after `steps` steps, instead of the steps made so far.

        The other picture must differ only in prompt and seed. `first_step_from` returns the step that comes next. The
        result does not depend on when this is called: the random generator gets its state after the skipped steps, and
        a multi-step sampler starts with its first order.

        Args:
            latent: [channels, height, width].
        """
        first = self.first_step_from(steps)
        self._sampler = self._new_sampler(first, restarts=True)
        self._seed()
        shape = tuple(self.latent.shape)
        self._draw(shape)
        self._sampler.skip_noise(first, shape, self.model.dtype, self._generator)
        started = self.model.runtime.to_device(latent[None], self.model.latent_dtype)
        if first < steps:
            started = self._sampler.renoise(started, self._draw(shape), steps).to(started.dtype)
        self._step_caches.clear()
        self.latent = self.estimate = started.contiguous()
        self.evaluation = self._sampler.first_evaluation

    def rows(self) -> list[Row]:
        """Return the rows of the next evaluation. Later calls return equal rows until `advance` is called."""
        sample = self._sampler.model_input(self.latent, self.evaluation)[0].to(self.model.dtype)
        halves = {Half.UNCONDITIONAL: self._conditions.unconditional, Half.CONDITIONAL: self._conditions.conditional}
        active = [control for control in self.controls if control.first <= self.evaluation < control.last]
        before = self._sampler.step_of(self.evaluation - 1) if self.begun else -1
        continued = self.loras_from is not None and before >= self.loras_from
        self._step_caches.enter(self.loras_now, controlled=bool(active), continued=continued)
        return [
            Row(
                owner=self,
                step=self.evaluation,
                half=half,
                sample=sample,
                timestep=self._sampler.timestep(self.evaluation),
                embeds=embeds,
                image=self.image,
                controls=tuple(control.handle for control in active if half in control.halves),
                loras=self.loras_now,
                activations=self.activations.row(half) if self.activations is not None else None,
                step_cache=None if active or self.activations is not None else self._step_caches.of(half.name),
                alone=self.alone,
            )
            for half in self.halves
            if (embeds := halves[half]) is not None
        ]

    def advance(self, noise: Mapping[Half, Tensor]) -> None:
        """Go on with the predictions of all its rows, [channels, height, width] each."""
        latent, estimate = guided_step(
            self._sampler,
            self.evaluation,
            self.latent,
            noise,
            guidance=Guidance(
                scale=cfg_scale(self.model, self.spec),
                rescale=self.spec.guidance_rescale,
                normalization=self.spec.cfg_normalization,
            ),
            generator=self._generator,
            operations=self.model.operations,
        )
        self.evaluation += 1
        if self.edit is not None:
            latent, estimate = self.edit.put_back(latent, self._sampler, self.evaluation), self.edit.paste(estimate)
        self.latent, self.estimate = latent, estimate
        if self.done:
            self._step_caches.clear()

    def forget_steps(self) -> None:
        """Release what later steps could reuse."""
        self._step_caches.clear()

    def state(self) -> RequestState:
        """Return a snapshot between two evaluations. Later ones do not change it."""
        return RequestState(
            evaluation=self.evaluation,
            latent=self.latent,
            generator=self._generator.get_state(),
            sampler=self._sampler.state(),
            image_latent=None if self.edit is None else self.edit.image_latent,
            noise=None if self.edit is None else self.edit.noise,
            image=None if self.image is None else self.image[self.model.mask_channels :],
            step_caches=dict(self._step_caches.state()),
        )

    def _seed(self) -> list[Tensor]:
        """Seed the generator. Return the noise for control images, which is drawn before all other noise."""
        self._generator.manual_seed(self.spec.seed + self.index)
        count = len(self.spec.controlnets) if self.model.family.draws_control_latents else 0
        return [self._draw(self._shape, encode_dtype(self.model.vae)) for _ in range(count)]

    def _new_sampler(self, begin: int, *, restarts: bool = False) -> Sampler:
        spec, model = self.spec, self.model
        return model.samplers.open(
            spec.sampling,
            steps=spec.num_inference_steps,
            begin=begin,
            tokens=model.tokens(spec.width, spec.height),
            restarts=restarts,
        )

    @property
    def _strength(self) -> float:
        return 1.0 if self.spec.strength is None else self.spec.strength

    def _start(self, sources: Sources) -> Tensor:
        """Return the latent before the first step. Random numbers are drawn in Diffusers' order."""
        if self.model.image_channels:
            return self._start_from_mask(sources)
        image, mask = sources.image, sources.mask
        if image is None:
            return self._draw(self._shape) * self._sampler.init_noise_sigma
        latent = self._draw_source(image)
        noise = self._draw(tuple(latent.shape), latent.dtype)
        if mask is not None:
            # Diffusers samples the masked image here. Only UNets of nine channels use it, but the draw advances the
            # generator, and so changes what ancestral samplers draw.
            self._draw(tuple(image.mean.shape), image.mean.dtype)
            self.edit = make_edit(self.model, latent.contiguous(), noise, mask)
            return self.edit.start(self._sampler, self.first_evaluation, self._strength)
        # Always contiguous: batches and checkpoints are, and the last bits of a sum depend on the memory layout.
        return self._sampler.add_noise(latent, noise, self.first_evaluation).contiguous()

    def _start_from_mask(self, sources: Sources) -> Tensor:
        """Return the latent before the first step of a model that reads the mask, and set what it reads.

        Without a mask, which only an engine's own samples lack, it reads zeros.
        """
        image, mask, masked_image = sources.image, sources.mask, sources.masked_image
        # Diffusers' pipeline of Flux Fill always samples the image, and at strength 1 its first noise level hides it.
        uses_image = self._strength < 1.0 or self.model.mask_channels > 1
        source = self._draw_source(image) if image is not None and uses_image else None
        noise = self._draw(self._shape)
        if mask is None or masked_image is None:
            self.image = torch.zeros(
                self.model.image_channels, *self._shape[2:], device=self.model.device, dtype=self.model.dtype
            )
        else:
            self.image = torch.cat([mask, self._draw_source(masked_image)], dim=1)[0].contiguous()
        if source is None:
            return noise * self._sampler.init_noise_sigma
        if mask is not None and self.model.mask_channels > 1:
            self.edit = make_edit(self.model, source, noise, mask)
        return self._sampler.add_noise(source, noise, self.first_evaluation).contiguous()

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        """Shape of its latent."""
        scale = self.model.latent_scale
        return 1, self.model.latent_channels, self.spec.height // scale, self.spec.width // scale

    def _draw_source(self, image: LatentDistribution) -> Tensor:
        """Return a sample of an encoded picture's latent."""
        drawn = image.mean + image.std * self._draw(tuple(image.mean.shape), image.mean.dtype)
        return to_latent(self.model, drawn.to(self.model.dtype))

    def _resumed_edit(self, state: RequestState, mask: Tensor | None) -> Edit | None:
        if state.image is not None and mask is not None:
            self.image = torch.cat([mask[0], self.model.runtime.to_device(state.image, self.model.dtype)])
        if mask is None or state.image_latent is None or state.noise is None:
            return None
        to_device = self.model.runtime.to_device
        image_latent, noise = (to_device(tensor, mask.dtype) for tensor in (state.image_latent, state.noise))
        return make_edit(self.model, image_latent, noise, mask)

    def _draw(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return standard normal noise, in the data type of latents between steps if `dtype` is None."""
        dtype = dtype or self.model.latent_dtype
        return self.model.runtime.to_device(torch.randn(shape, generator=self._generator, dtype=dtype))
