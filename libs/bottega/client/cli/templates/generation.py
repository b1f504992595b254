"""What recorded activations add to commands that draw: lines about what of an edit was computed, and what reused."""

from __future__ import annotations

from collections.abc import Iterator

from bottega import kinds
from bottega.client.cli.addons import GenerationPart
from bottega.client.cli.terminal import share_text, short_hash
from bottega.v1.generation_pb2 import Provenance


def _describe(provenance: Provenance) -> Iterator[str]:
    use = provenance.mask
    if provenance.blocks_reused:
        blocks = share_text(provenance.blocks_reused / max(provenance.blocks_total, provenance.blocks_reused))
        where = f"recording {short_hash(use.recording)}" if use.recording else "what was recorded"
        yield f"masked blocks: {blocks} of all blocks took what is not masked from {where} (approximate)"
        yield f"masked blocks: {share_text(use.computed_share)} of the tokens computed in them"
    elif use.computed_all_because:
        yield f"all was computed: {use.computed_all_because}"
    if use.kept_latents:
        yield "kept for editing: outside the mask the latents are those that drew the image"
    if use.recorded:
        yield "recorded: later edits of this image can compute the masked part alone"


PART = GenerationPart(options=(), stage=kinds.ACTIVATIONS, describe=_describe)
