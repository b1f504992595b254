"""Measures how late a LoRA may come into a picture, with pictures that the running suite draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.types.lora import Lora
from bottega.client.types.messages import as_list, describe
from bottega.client.types.picture import Picture
from bottega.client.types.provenance import LoraUse
from bottega.errors import InternalError, LoraUnusable, Violation
from bottega.planning import latest_step
from bottega.rules import refuse

# One picture says little of the next one: the least that a profile is made of.
LEAST_PROMPTS = 4
SEEDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBoundMeasured:
    """How late the LoRA of that digest may come into requests of so many steps: max_step, see client.Lora.

    prompts: of each, the bound that its own pictures have; max_step is the least of them.
    """

    digest: str
    num_inference_steps: int
    max_step: int
    prompts: tuple[int, ...]


async def measure_lora(
    client: AsyncGatewayClient,
    name: str,
    prompts: Sequence[str],
    *,
    scale: float,
    num_inference_steps: int | None,
    model: str | None,
    on_prompt: Callable[[int], None],
) -> LoraBoundMeasured:
    """Pictures of one prompt after the other, each with two seeds. on_prompt: told the bound of each.

    Raises InvalidRequest for too few prompts, LoraUnusable where the LoRA is replaced meanwhile, and what drawing
    raises.
    """
    refuse(list(_check_prompts(prompts)))
    lora = Lora(name, scale, measure_similarity=True)
    bounds: list[int] = []
    digests: set[str] = set()
    for number, prompt in enumerate(prompts):
        picture, *_ = await client.generate_many(
            prompt, SEEDS, seed=SEEDS * number, model=model, num_inference_steps=num_inference_steps, lora=[lora]
        )
        use = _use(picture, name)
        digests.add(use.digest)
        bounds.append(latest_step(use.similarities))
        on_prompt(bounds[-1])
    if len(digests) > 1:
        raise LoraUnusable(f"{name} was replaced between two pictures: measure again", metadata={"lora": name})
    return LoraBoundMeasured(
        digest=digests.pop(),
        num_inference_steps=picture.provenance.parameters.num_inference_steps,
        max_step=min(bounds),
        prompts=tuple(bounds),
    )


def _check_prompts(prompts: object) -> Iterator[Violation]:
    given = as_list(prompts, name="prompts", what="texts")
    wrong = [prompt for prompt in given if not isinstance(prompt, str)]
    if wrong:
        yield Violation(field="prompts", description=f"must be texts; got {describe(wrong[0])}")
    elif len(set(given)) < LEAST_PROMPTS:
        rule = f"at least {LEAST_PROMPTS} different ones are needed: one picture says little of the next"
        yield Violation(field="prompts", description=rule)


def _use(picture: Picture, name: str) -> LoraUse:
    """Raises LoraUnusable where nothing was measured, InternalError where it is not the one that was asked for."""
    if len(picture.provenance.loras) != 1:
        raise InternalError(f"the picture's provenance has no entry for {name} by itself")
    use = picture.provenance.loras[0]
    if not use.similarities:
        raise LoraUnusable(
            f"worker {picture.provenance.worker} did not measure {name}: is it of an earlier version?",
            metadata={"lora": name},
        )
    return use
