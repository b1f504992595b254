"""Transformers of Stable Diffusion 3 and Flux.1 for masked rows: image tokens outside masks are read from recordings.

The tokens of the text are computed in every block, because they depend on the prompt and on the masked tokens. The
computed tokens of image and text attend to all tokens. Source: InstGenIE (2025), which caches Flux in this way.

A recording contains a block's output instead of its keys and values. Keys and values would take twice the bytes, or
four times with the second attention of Stable Diffusion 3.5, so at most half as many blocks would fit into a template.
Where projecting them again is slow, keys and values are cached beside the recording
(`self_attention.keep_projections`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diffusers import ModelMixin
from torch import Tensor

from bottega.addons.edits.engine.activations import edit_activations
from bottega.addons.edits.engine.masked.feature_maps import PackedTokens, TokensIn
from bottega.addons.edits.engine.masked.self_attention import MaskedTokens, packed_input
from bottega.addons.edits.engine.masked.tokens import MaskedActivations, TokenCache
from bottega.model.backbone import Activations, Backbone, Block, Inputs, RowSpans
from bottega.model.backbones.flux import FluxBackbone
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.joint_blocks import AllTokens, Rotary, modulation, run_block
from bottega.model.operations import Operations
from bottega.model.rows import Row

# Lists of blocks in the networks, in order of execution.
_BLOCKS = ("transformer_blocks", "single_transformer_blocks")


@dataclass(slots=True, kw_only=True)
class JointActivations(MaskedActivations):
    """The state of a masked forward pass of a transformer."""

    tokens: tuple[int, int]
    """Height and width of the picture in tokens."""
    controlled: bool
    """Whether ControlNets add residuals between blocks, to the outputs for all tokens."""
    made: PackedTokens | None = None
    """Output of the previous block. None before the first block and where residuals are added: then read `hidden`."""

    def rotary_of(self, tokens: slice) -> Rotary | None:
        """Return the rotary cosines and sines of a slice of a row's tokens, repeated for every row.

        Return None if the network has no rotary embedding.
        """
        if self.rotary is None:
            return None
        cosines, sines = (table[tokens].repeat(len(self.hidden), 1) for table in self.rotary)
        return cosines, sines


class MaskedJointBackbone:
    """A transformer whose rows may reuse recorded activations.

    Args:
        plain: The plain backbone, whose modules it runs.
        beat: Called after each block, see `Heartbeat`.
    """

    def __init__(
        self,
        plain: Sd3Backbone | FluxBackbone,
        *,
        beat: Callable[[], None] | None = None,
        operations: Operations | None = None,
    ) -> None:
        self._plain = plain
        self.spans: RowSpans = RowSpans()
        self.finish_needs = plain.finish_needs
        self.block_names = joint_blocks(plain.network)
        self.blocks: Sequence[Block] = [
            Block(name=block.name, run=self._block(index, block.name), needs=block.needs)
            for index, block in enumerate(plain.blocks)
        ]
        self._tokens = TokenCache()
        self._beat = beat
        self._operations = operations or Operations()

    def backbone_for(self, rows: Sequence[Row]) -> Backbone | None:
        """Return this backbone for batches with a row that reads or writes a recording; None for others."""
        return self if any(row.activations is not None for row in rows) else None

    def begin(self, inputs: Inputs) -> JointActivations:
        plain = self._plain.begin(inputs)
        height, width = (side // self._plain.patch_size for side in plain.size)
        return JointActivations(
            hidden=plain.hidden,
            embedding=plain.embedding,
            context=plain.context,
            size=plain.size,
            rotary=plain.rotary,
            edits=[edit_activations(activations) for activations in inputs.activations] or [None] * len(plain.hidden),
            cache=self._tokens,
            spans=self.spans,
            moves=self._operations.moves,
            tokens=(height, width),
            controlled=inputs.controlled,
        )

    def finish(self, activations: Activations) -> Tensor:
        forward, network = _masked(activations), self._plain.network
        made = forward.made
        if made is None:  # Residuals were added to the output of the last block.
            hidden = forward.points.pop(len(self.blocks) - 1)
            recorded = forward.recorded(self.block_names[-1])
            packing = forward.packing(forward.tokens, [rest is not None for rest in recorded])
            made = PackedTokens(items=packing.pack(hidden), packing=packing, recorded=recorded)
        layout, (scale, shift) = made.packing.layout, modulation(network.norm_out, forward.embedding)
        normed = layout.modulate(network.norm_out.norm(made.items), shift, scale)
        tokens = made.packing.merge(layout.run(network.proj_out, normed), made.recorded)
        forward.put(self.block_names[-1], tokens)
        return self._plain.unpatchify(tokens, forward.size)

    def _block(self, index: int, path: str) -> Callable[[Activations], None]:
        block = self._plain.network.get_submodule(path)
        names, is_last = self.block_names, index == len(self.block_names) - 1

        def run(activations: Activations) -> None:
            forward = _masked(activations)
            # As in the plain block: after `select`, only the tensor in `points` has the residuals.
            forward.hidden = forward.points.pop(index - 1, forward.hidden)
            recorded = forward.recorded(names[index])
            masked = [rest is not None for rest in recorded]
            packing = forward.packing(forward.tokens, masked)
            made, whole = forward.made, None if forward.made is not None else forward.hidden
            if index == 0:
                # A token's embedding depends only on its own patch, and patches outside the mask equal those of the
                # recording. With Flux Fill, the embedding depends on the masked image too.
                as_recorded = masked if not self._plain.image_channels else [False] * len(masked)
                made = packed_input(TokensIn(whole=forward.hidden, as_recorded=as_recorded), masked, packing)
            length = forward.context.shape[1]
            picture = MaskedTokens(
                before=names[index - 1],
                size=forward.tokens,
                made=made,
                whole=whole,
                packing=packing,
                forward=forward,
                rotary=forward.rotary_of(slice(length, None)),
            )
            prompt = AllTokens(
                tokens=forward.context.flatten(0, 1),
                layout=packing.layout.aligned(length),
                rotary=forward.rotary_of(slice(length)),
            )
            items, texts = run_block(block, path, picture, prompt, forward.embedding, is_last=is_last)
            forward.context = texts.view_as(forward.context)
            forward.made = PackedTokens(items=items, packing=packing, recorded=recorded)
            if forward.controlled and (self.finish_needs or not is_last):
                if is_last:  # The last block's output is not recorded, and nothing reads it outside the mask.
                    rest = items.new_zeros(packing.tokens, items.shape[1])
                    recorded = [None if each is None else rest for each in recorded]
                forward.hidden = forward.points[index] = packing.merge(items, recorded)
                if not is_last:
                    forward.put(names[index], forward.hidden)
                forward.made = None
            if self._beat is not None:
                self._beat()

        return run


def joint_paths(transformer: ModelMixin) -> tuple[str, ...]:
    """Return the paths of a transformer's blocks."""
    return tuple(f"{name}.{index}" for name in _BLOCKS for index in range(len(getattr(transformer, name, ()))))


def joint_blocks(transformer: ModelMixin) -> tuple[str, ...]:
    """Return the names of the recorded outputs, one for each block.

    Only the output projection reads the last block's output, so the output of the projection is recorded instead: it
    has fewer channels.
    """
    return *joint_paths(transformer)[:-1], "proj_out"


def _masked(activations: Activations) -> JointActivations:
    assert isinstance(activations, JointActivations), "`begin` made the activations"
    return activations
