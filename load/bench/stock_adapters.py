"""What a stock pipeline draws with beside its model: ControlNets that stay loaded, and LoRAs that come and go."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any


class StockAdapters:
    """Of one text-to-image pipeline, in whose UNet the LoRAs go."""

    def __init__(self, pipeline: Any) -> None:
        from diffusers.utils import logging

        # PEFT's, of every LoRA that comes to another one.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        logging.set_verbosity_error()
        self._pipeline = pipeline
        self._nets: dict[str, Any] = {}
        self._fused = False

    def with_controlnets(self, folders: Sequence[str], *, cold: bool = False) -> Any:
        """A pipeline with these; without any, the plain one. cold: whether they are loaded anew."""
        from diffusers import StableDiffusionXLControlNetPipeline

        if not folders:
            return self._pipeline
        controlled = StableDiffusionXLControlNetPipeline(
            **self._pipeline.components,
            controlnet=[self._net(folder, cold=cold) for folder in folders],
            force_zeros_for_empty_prompt=self._pipeline.config.force_zeros_for_empty_prompt,
            add_watermarker=False,
        )
        controlled.set_progress_bar_config(disable=True)
        return controlled

    def load_loras(self, files: Sequence[str], *, fuse: bool) -> None:
        """Puts these in, where there are none. files: as Diffusers saves them. fuse: whether into the weights."""
        for number, file in enumerate(files):
            self._pipeline.load_lora_weights(file, use_safetensors=True, adapter_name=f"lora{number}")
        self._pipeline.set_adapters([f"lora{number}" for number in range(len(files))])
        if fuse:
            self._pipeline.fuse_lora()
        self._fused = fuse

    def unload_loras(self) -> None:
        """Takes all of them out."""
        if self._fused:
            self._pipeline.unfuse_lora()
        self._pipeline.unload_lora_weights()

    def _net(self, folder: str, *, cold: bool) -> Any:
        from diffusers import ControlNetModel

        if cold or folder not in self._nets:
            self._nets[folder] = ControlNetModel.from_pretrained(
                folder, use_safetensors=True, torch_dtype=self._pipeline.dtype
            )
        return self._nets[folder]
