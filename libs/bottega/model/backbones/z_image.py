"""Z-Image's transformer in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from torch import Tensor, nn

from bottega.model.backbone import Activations, Block, Inputs, RowSpans

# Number of training timesteps of the scheduler. The network instead counts time from 0 (noise) to 1 (picture).
_TRAINING_STEPS = 1000
# A picture is one frame.
_FRAMES = 1


class ZImageBackbone:
    """Z-Image's transformer in blocks. The blocks' results are bit-equal to those of the transformer's forward.

    A token of a picture is a patch of 2x2 elements of its latent. The network fills up pictures and prompts with
    learned tokens, to multiples of 32. Prompts of one forward may have different lengths, and pictures different sizes;
    attention does not read the padding of shorter rows. Small transformers refine pictures and prompts, before the
    blocks compute all tokens. It has no residual points, because ControlNets for it are not served.

    Source: ZImagePipeline and ZImageTransformer2DModel.forward of Diffusers.
    """

    finish_needs: tuple[int, ...] = ()
    image_channels = 0
    patch_size = 2

    def __init__(self, transformer: ZImageTransformer2DModel) -> None:
        self.network = transformer
        """The transformer, as Diffusers loads it."""
        self.spans = RowSpans()
        # A network has its layers by patch size; the pipelines use one size.
        patches = f"{self.patch_size}-{_FRAMES}"
        self._embed, self._finish = (
            getattr(transformer, layers)[patches] for layers in ("all_x_embedder", "all_final_layer")
        )
        self.blocks: Sequence[Block] = [
            Block(name=f"layers.{index}", run=partial(_run_layer, layer))
            for index, layer in enumerate(transformer.layers)
        ]

    def begin(self, inputs: Inputs) -> Activations:
        return self.begin_rows([inputs])

    def begin_rows(self, parts: Sequence[Inputs]) -> Activations:
        """Embed the inputs of adjacent rows; each part has the rows of one size."""
        network = self.network
        latents = [latent for part in parts for latent in part.sample]
        prompts = [prompt for part in parts for prompt in _prompts(part)]
        time = (_TRAINING_STEPS - torch.cat([part.timestep for part in parts])) / _TRAINING_STEPS
        embedding = network.t_embedder(time * network.t_scale).type_as(latents[0])
        pictures, texts, _, picture_places, text_places, picture_fill, text_fill = network.patchify_and_embed(
            [latent.unsqueeze(1) for latent in latents], prompts, self.patch_size, _FRAMES
        )
        made = self._prepare(self._embed, pictures, picture_places, picture_fill, network.x_pad_token)
        picture, picture_rotations, mask, *_ = made
        for layer in network.noise_refiner:
            picture = layer(picture, mask, picture_rotations, embedding)
        made = self._prepare(network.cap_embedder, texts, text_places, text_fill, network.cap_pad_token)
        text, text_rotations, mask, *_ = made
        for layer in network.context_refiner:
            text = layer(text, mask, text_rotations)
        hidden, rotations, mask, _ = network._build_unified_sequence(
            *(picture, picture_rotations, list(map(len, pictures)), None),
            *(text, text_rotations, list(map(len, texts)), None),
            *(None, None, None, None),  # Reference pictures, which are not served.
            omni_mode=False,
            device=embedding.device,
        )
        return Activations(
            hidden=hidden,
            embedding=embedding,
            context=text,
            rotations=rotations,
            mask=mask,
            lengths=[len(picture) + len(text) for picture, text in zip(pictures, texts, strict=True)],
            sizes=[(latent.shape[-2], latent.shape[-1]) for latent in latents],
        )

    def finish(self, activations: Activations) -> Tensor:
        return torch.stack(self.finish_rows(activations))

    def finish_rows(self, activations: Activations) -> list[Tensor]:
        """Return the prediction for each row, [channels, height, width]."""
        tokens = self._finish(activations.hidden, c=activations.embedding)
        sizes = [(_FRAMES, *size) for size in activations.sizes]
        pictures = self.network.unpatchify(list(tokens.unbind()), sizes, self.patch_size, _FRAMES)
        # The network predicts the direction to the picture, and schedulers want that to the noise.
        return [-picture.squeeze(1) for picture in pictures]

    def _prepare(
        self, embed: nn.Module, rows: Sequence[Tensor], places: Sequence[Tensor], fill: Sequence[Tensor], token: Tensor
    ) -> Any:
        """Embed the tokens of each row. Return the embedded tokens, their rotary embedding and their mask as tensors.

        Args:
            places: Position of each token of a row, [tokens, 3].
            fill: Whether each token of a row is replaced by `token`, the learned token.
        """
        lengths = list(map(len, rows))
        with self.spans.packed(tuple(accumulate(lengths, initial=0))):
            embedded = embed(torch.cat(list(rows))).split(lengths)
        return self.network._prepare_sequence(list(embedded), list(places), list(fill), token, None, token.device)


def _prompts(part: Inputs) -> list[Tensor]:
    """Return the embeddings of each row's prompt without padding, [tokens, features]."""
    lengths = part.prompt_lengths or [part.prompt_embeds.shape[1]] * len(part.sample)
    return [prompt[:length] for prompt, length in zip(part.prompt_embeds, lengths, strict=True)]


def _run_layer(layer: nn.Module, activations: Activations) -> None:
    """Run a block, in which all tokens of picture and prompt attend to each other."""
    activations.hidden = layer(activations.hidden, activations.mask, activations.rotations, activations.embedding)
