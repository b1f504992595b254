"""The techniques of the suite that a day can be drawn without, and what each of them did in the pictures that came."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from bottega.client import Picture
from load.replay.requests import PlannedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Techniques:
    """Which are on.

    identical_answers: a request that was drawn before is answered with the stored picture. cached_starts: pictures may
    start from the latents of similar prompts. masked_blocks: edits compute their masked part. sparse_convolutions:
    convolutions, too. stored_activations: what edits record is kept for the next day, and for all workers; without it,
    in the worker that recorded it. controlnet_server: ControlNets run beside the worker; without it, in it.
    late_residuals: its residuals may be a step old. late_loras: steps are made before LoRAs are there. batches:
    requests share turns; without it one is drawn at a time.
    """

    identical_answers: bool = True
    cached_starts: bool = True
    masked_blocks: bool = True
    sparse_convolutions: bool = True
    stored_activations: bool = True
    controlnet_server: bool = True
    late_residuals: bool = True
    late_loras: bool = True
    batches: bool = True


ALL = Techniques()
# Stages of which those who share a turn have all of it each.
_TURNS = ("denoise", "batch", "controlnets")
LABELS = {
    "identical_answers": "stored answers to identical requests",
    "cached_starts": "starts from cached latents",
    "masked_blocks": "masked blocks of edits",
    "sparse_convolutions": "convolutions of edits around their masks alone",
    "stored_activations": "the activation store",
    "controlnet_server": "ControlNets on a server of their own",
    "late_residuals": "residuals of ControlNets that may be a step old",
    "late_loras": "LoRAs that may come late",
    "batches": "batches, joined at every step",
}


def without_each() -> dict[str, Techniques]:
    """By the name of a technique, all of them but that one."""
    # Nothing is recorded where nothing is reused: a store would be none the less there.
    also_off = {"masked_blocks": ("stored_activations",)}
    return {
        name: replace(ALL, **dict.fromkeys((name, *also_off.get(name, ())), False))
        for name in (each.name for each in fields(Techniques))
    }


@dataclass(slots=True, kw_only=True)
class Uses:
    """What provenances say, added up over the pictures of a run.

    steps, skipped: denoising steps that were asked for, and those that cached latents stood for. identical: pictures
    that were not drawn. cached: pictures that started from a latent. blocks, reused: of edits, transformer blocks, and
    those of which the masked part alone was computed. late: pictures of which a LoRA came after the first step.
    served: pictures with ControlNets that a server ran. pictures: all. requests: that steps had together, summed over
    the pictures that were drawn. stages: seconds of each request by stage. turns_s: seconds of the worker's turns that
    a request had to itself, where those who share one have equal parts of it.
    """

    pictures: int = 0
    identical: int = 0
    cached: int = 0
    steps: int = 0
    skipped: int = 0
    blocks: int = 0
    reused: int = 0
    late: int = 0
    served: int = 0
    requests: float = 0.0
    stages: dict[PlannedRequest, dict[str, float]] = field(default_factory=dict)
    turns_s: dict[PlannedRequest, float] = field(default_factory=dict)

    def add(self, request: PlannedRequest, picture: Picture) -> None:
        """One more."""
        made = picture.provenance
        stages = self.stages[request] = {time.stage: time.seconds for time in made.times}
        self.turns_s[request] = sum(stages.get(name, 0.0) for name in _TURNS) / max(1.0, made.mean_group_requests)
        self.pictures += 1
        self.steps += made.parameters.num_inference_steps
        if made.identical_job:
            self.identical += 1
            return
        self.cached += bool(made.cached_starts)
        self.skipped += sum(start.skipped_steps for start in made.cached_starts)
        self.blocks += made.blocks_total
        self.reused += made.blocks_reused
        self.late += any(lora.from_step > made.begin_step for lora in made.loras)
        self.served += any(server != made.worker for net in made.controlnets for server in net.servers)
        self.requests += made.mean_group_requests

    def said(self) -> Iterator[str]:
        """Each technique that took part, in words."""
        if self.identical:
            yield f"{self.identical} answered with a stored picture"
        if self.cached:
            yield f"{self.cached} from cached latents ({self.skipped / self.steps:.0%} of all steps spared)"
        if self.reused:
            yield f"{self.reused / self.blocks:.0%} of edits' blocks masked"
        if self.served:
            yield f"{self.served} with ControlNets of a server"
        if self.late:
            yield f"{self.late} with LoRAs that came late"
        if drawn := self.pictures - self.identical:
            yield f"{self.requests / drawn:.1f} requests a step"
