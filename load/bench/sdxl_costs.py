"""What the stages of SDXL cost, by the operations that PyTorch counts on its networks. No weights are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from load.gpu_report.topology import SDXL


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds of one picture's stages at 1024x1024, and the weights of their networks."""

    encode_s: float
    """Seconds to encode a prompt; with guidance there are two."""
    row_s: float
    """Seconds of the UNet for one row; with guidance a step has two."""
    controlnet_s: float
    """Seconds of a ControlNet for one row."""
    decode_s: float
    denoiser_share: float
    """Share of all weights that a device needs which only denoises."""

    def stages_s(self, steps: int, rows: int, slowdown: float = 1.0) -> tuple[float, float, float]:
        """Return the seconds of encoding, denoising and decoding.

        Args:
            steps: Denoising steps.
            rows: Rows of a step: 2 with guidance, else 1.
            slowdown: How many times as long steps take with LoRAs.
        """
        return rows * self.encode_s, steps * rows * self.row_s * slowdown, self.decode_s


def counted_costs(step_s: float) -> StageCosts:
    """Count the operations of SDXL-base's networks, and convert them to seconds.

    Args:
        step_s: Seconds of a guided step.
    """
    import torch
    from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
    from torch import nn
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    text_1, text_2 = CLIPTextConfig(**SDXL.text), CLIPTextConfig(**SDXL.text_2)
    with torch.device("meta"):
        texts: tuple[nn.Module, ...] = (CLIPTextModel(text_1), CLIPTextModelWithProjection(text_2))
        unet, vae = UNet2DConditionModel(**SDXL.unet), AutoencoderKL(**SDXL.vae)
        net = ControlNetModel.from_unet(
            unet, conditioning_embedding_out_channels=SDXL.controlnet_channels, load_weights_from_unet=False
        )
        tokens = torch.zeros(1, SDXL.prompt_tokens, dtype=torch.long)
        latent, prompt = torch.empty(1, 4, 128, 128), torch.empty(1, SDXL.prompt_tokens, 2048)
        pooled = {"text_embeds": torch.empty(1, 1280), "time_ids": torch.empty(1, 6)}
        image = torch.empty(1, 3, 1024, 1024)
        row = _operations(lambda: unet(latent, 1, prompt, added_cond_kwargs=pooled))
        control = _operations(lambda: net(latent, 1, prompt, image, added_cond_kwargs=pooled))
        decode = _operations(lambda: vae.decode(latent))
        encode = sum(_operations(lambda text=text: text(tokens)) for text in texts)  # type: ignore[misc]
    seconds = step_s / (2 * row)
    weights = [sum(weight.numel() for weight in part.parameters()) for part in (unet, vae, *texts)]
    return StageCosts(
        encode_s=encode * seconds,
        row_s=row * seconds,
        controlnet_s=control * seconds,
        decode_s=decode * seconds,
        denoiser_share=weights[0] / sum(weights),
    )


def _operations(forward: Callable[[], object]) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward()
    return int(counter.get_total_flops())
