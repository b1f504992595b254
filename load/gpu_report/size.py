"""How much is measured: all of it on a GPU, or as little as shows that the report works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from load.gpu_report.topology import SDXL, SMALL, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """side: of a picture, in pixels. steps: of one; edit_steps: of an edit, whose recordings take memory for each.

    rounds: of what is timed, one more runs before. batches: pictures at once. dtype: of the model.
    lora_ranks: of LoRAs. controlnets: most of them in one request. mask_shares: of the tokens of an edit.
    wanted: whether figures are compared with what was wanted of them.
    """

    name: str
    topology: Topology
    side: int
    steps: int
    edit_steps: int
    rounds: int
    batches: tuple[int, ...]
    dtype: str
    lora_ranks: tuple[int, ...]
    controlnets: int
    mask_shares: tuple[float, ...]
    wanted: bool


FULL = Size(
    name="full",
    topology=SDXL,
    side=1024,
    steps=50,
    edit_steps=20,
    rounds=3,
    batches=(1, 2, 4, 8),
    dtype="float16",
    lora_ranks=(32, 128),
    controlnets=3,
    mask_shares=(0.05, 0.11, 0.19, 0.35),
    wanted=True,
)
SMALL_SIZE = Size(
    name="small",
    topology=SMALL,
    side=64,
    steps=4,
    edit_steps=4,
    rounds=1,
    batches=(2,),
    dtype="float32",
    lora_ranks=(4,),
    controlnets=1,
    mask_shares=(0.19,),
    wanted=False,
)
SIZES: Mapping[str, Size] = {size.name: size for size in (FULL, SMALL_SIZE)}
