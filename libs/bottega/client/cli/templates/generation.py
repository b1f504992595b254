"""What recorded activations add to commands that draw: lines about what of an edit was computed, and what reused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bottega import kinds
from bottega.client.cli.addons import GenerationPart
from bottega.client.cli.terminal import share_text, short_hash
from bottega.client.types.options import GenerationOptions
from bottega.client.types.provenance import Provenance


def _merge(options: GenerationOptions, given: dict[str, Any], like: Path | None) -> None:
    """Drop what an earlier edit took from others, or that it took nothing, where the command says anew what it may."""
    if given.get("masked_blocks") is not None or given.get("fidelity") is not None:
        options.pop("recording", None)
        options.pop("masked_blocks", None)


def _describe(provenance: Provenance) -> Iterator[str]:
    use = provenance.mask
    if provenance.blocks_reused:
        blocks = share_text(provenance.blocks_reused / max(provenance.blocks_total, provenance.blocks_reused))
        where = f"recording {short_hash(use.recording)}" if use.recording else "what was recorded"
        yield f"masked blocks: {blocks} of all blocks took what is not masked from {where} (approximate)"
        yield f"masked blocks: {share_text(use.computed_share)} of the tokens computed in them"
    elif use.computed_all_because:
        yield f"all was computed: {use.computed_all_because}"
    if use.recording and not provenance.blocks_reused and not use.kept_latents:
        yield f"outside the mask the noise is that of recording {short_hash(use.recording)} (approximate)"
    if use.kept_latents:
        yield "kept for editing: outside the mask the latents are those that drew the image"
    if use.recorded:
        yield "recorded: later edits of this image can compute the masked part alone"


PART = GenerationPart(options=(), stage=kinds.ACTIVATIONS, describe=_describe, merge=_merge)
