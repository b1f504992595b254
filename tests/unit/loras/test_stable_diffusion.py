"""kohya's LoRAs of Stable Diffusion 1 and 2, whose UNets they name as Diffusers does, add what Diffusers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bottega.addons.loras.wire import canonical
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import convert, sources
from bottega.loras.importing.naming import base_family
from tests.samples.family_models import FamilyStock, family_model
from tests.samples.lora_files import base_shapes, canonical_deltas, factors, save

TARGETS = (
    "proj_in",
    "attn1.to_q",
    "attn2.to_out.0",
    "ff.net.0.proj",
    "self_attn.q_proj",
    "self_attn.out_proj",
    "mlp.fc1",
)
RANK, ALPHA = 2, 1.0


@pytest.mark.parametrize("family", ["SD 1", "SD 2"])
def test_kohyas_loras_of_stable_diffusion_add_what_diffusers_loads(family: str, tmp_path: Path) -> None:
    folder, generator = family_model(family), torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for component, prefix in (("unet", "lora_unet"), ("text_encoder", "lora_te")):
        for path, shape in base_shapes(component, folder).items():
            if path.endswith(TARGETS):
                whole = path if component == "unet" or path.startswith("text_model") else f"text_model.{path}"
                name = f"{prefix}_{whole.replace('.', '_')}"
                down, up = factors(shape, RANK, generator=generator)
                tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
                tensors[f"{name}.alpha"] = torch.tensor(ALPHA)
    file = save(tensors, tmp_path / "trained.safetensors")
    assert base_family(folder) == family.replace("SD", "Stable Diffusion")
    converted = convert(sources(file, b""), base=read_base(folder))
    with (tmp_path / "canonical.safetensors").open("wb") as written:
        canonical.write(written, converted.modules)
    deltas = canonical_deltas(tmp_path / "canonical.safetensors")
    assert len(deltas) == len(tensors) / 3

    stock = FamilyStock(family).text
    before = {name: getattr(stock, name).state_dict() for name in ("unet", "text_encoder")}
    before = {part: {name: tensor.clone() for name, tensor in state.items()} for part, state in before.items()}
    stock.load_lora_weights(str(file))
    stock.fuse_lora()
    stock.unload_lora_weights()
    changed = set()
    for part, state in before.items():
        for name, tensor in getattr(stock, part).state_dict().items():
            if not torch.equal(tensor, state[name]):
                path = f"{part}.{name.removesuffix('.weight')}"
                changed.add(path)
                assert torch.allclose((tensor - state[name]).double(), deltas[path], atol=1e-5), path
    assert changed == deltas.keys()
