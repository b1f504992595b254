"""The SDK and the command with LoRAs, against a real gateway with one store or two."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file

from bottega import errors
from bottega.addons.loras.client.stores import read_lora
from bottega.client import AsyncClient
from bottega.loras.config import ImportConfig
from bottega.v1 import lora_pb2 as pb
from tests.samples.family_models import family_model
from tests.samples.lora_files import save
from tests.samples.transformer_loras import kohya_file, random_lora
from tests.support import running_loras
from tests.support.gateway_with_loras import House, lora_house, lora_store
from tests.support.running_gateway import running_gateway
from tests.support.running_loras import PATIENCE_S, lora_file, peft_folders
from tests.support.terminal import run_at


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with lora_house(tmp_path) as made:
        yield made


@pytest.fixture
async def client(house: House) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(house.gateway.address, fleet_address=house.gateway.fleet_address) as made:
        yield made


@pytest.fixture
async def annex(house: House, tmp_path: Path) -> AsyncIterator[running_loras.Running]:
    """Comes after the other one by its name."""
    bases = {"miniature": "miniature", "third": "miniature"}
    async with lora_store(house.gateway, tmp_path / "annex", name="second", bases=bases) as store:
        yield store


async def _names(store: running_loras.Running) -> list[str]:
    answer = await store.stub.ListLoras(pb.ListLorasRequest(), timeout=PATIENCE_S)
    return [lora.name for lora in answer.loras]


async def _run(house: House, *said: object) -> Result:
    return await run_at(house.gateway, "loras", *said)


async def test_what_several_stores_have_is_one_list(
    house: House, annex: running_loras.Running, client: AsyncClient, tmp_path: Path
) -> None:
    await annex.upload("pastel", lora_file(tmp_path, seed=2))
    await annex.upload("ink", lora_file(tmp_path, seed=3))
    listed = await client.loras()
    assert [lora.name for lora in listed] == ["ink", "pastel", "wash"]
    assert listed[0].digest == house.ink.digest == (await client.lora("ink")).digest, "the first store counts"


async def test_a_lora_is_looked_after_in_the_store_that_has_it(
    house: House, annex: running_loras.Running, client: AsyncClient, tmp_path: Path
) -> None:
    pastel = await annex.upload("pastel", lora_file(tmp_path, seed=2))
    assert (await client.pin_lora("pastel")).pinned
    with pytest.raises(errors.LoraExists):
        await client.add_lora("pastel", lora_file(tmp_path, seed=3), base="miniature")
    again = await client.add_lora("pastel", lora_file(tmp_path, seed=2), base="miniature")
    assert (again.digest, again.pinned) == (pastel.digest, True)
    await client.remove_lora("pastel")
    assert (await _names(annex), await _names(house.store)) == ([], ["ink", "wash"])
    with pytest.raises(errors.LoraNotFound):
        await client.remove_lora("pastel")


async def test_a_new_one_goes_where_its_base_is_known(
    house: House, annex: running_loras.Running, client: AsyncClient, tmp_path: Path
) -> None:
    for name, base in (("a", "miniature"), ("b", "third"), ("c", "other")):
        await client.add_lora(name, lora_file(tmp_path, seed=2), base=base)
    assert (await _names(house.store), await _names(annex)) == (["a", "c", "ink", "wash"], ["b"])
    with pytest.raises(errors.InvalidRequest, match="miniature, other, third"):
        await client.add_lora("d", lora_file(tmp_path, seed=2))
    with pytest.raises(errors.InvalidRequest, match="these base models"):
        await client.add_lora("d", lora_file(tmp_path, seed=2), base="fourth")


async def test_a_store_that_is_gone_hides_what_it_has_and_nothing_else(
    house: House, annex: running_loras.Running, client: AsyncClient, tmp_path: Path
) -> None:
    await annex.upload("pastel", lora_file(tmp_path, seed=2))
    await house.store.server.stop()
    assert (await client.lora("pastel")).name == "pastel"
    with pytest.raises(errors.NoLora, match="loras"):
        await client.lora("ink")


async def test_the_command_brings_lists_shows_and_removes(house: House, tmp_path: Path) -> None:
    path = lora_file(tmp_path, seed=2, text=True)
    added = await _run(house, "add", "pastel", path, "--base", "miniature", "--trigger", "in pastel")
    assert re.fullmatch(r"pastel is ready for miniature: 2 modules of rank 2, [1-9]\.\d KiB\n", added.stdout)
    assert "It is for SDXL: all layers of its file match the model, and none is ignored.\n" in added.stderr
    assert [line.split()[:2] for line in (await _run(house)).stdout.splitlines() if "miniature" in line] == [
        ["ink", "miniature"],
        ["pastel", "miniature"],
    ]
    shown = (await _run(house, "show", "pastel")).stdout
    assert re.match(r"\s*name +pastel *\n base", shown), "no head without names"
    for said in ("in pastel", "kohya", "a fifth of the steps (not measured)", house.ink.base):
        assert said in shown
    assert re.search(r"in the store's memory +no\b", shown)
    pinned = (await _run(house, "pin", "ink")).stdout
    assert re.fullmatch(r"ink is pinned, and takes [1-9]\.\d KiB of its store's memory\n", pinned)
    assert re.search(r"in the store's memory +yes \(pinned\)", (await _run(house, "show", "ink")).stdout)
    assert (await _run(house, "unpin", "ink")).stdout == "ink is not pinned any more\n"
    assert "(pinned)" not in (await _run(house, "show", "ink")).stdout
    assert (await _run(house, "remove", "pastel")).stdout == "pastel is removed\n"
    gone = await _run(house, "show", "pastel")
    assert (gone.exit_code, gone.stderr.splitlines()[0]) == (1, "error: no such LoRA: pastel")


def test_what_is_no_lora_is_refused_by_the_name_of_the_argument(tmp_path: Path) -> None:
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "folder").mkdir()
    peft = peft_folders(tmp_path / "peft")
    (peft / "text_encoder" / "adapter_model.safetensors").rename(peft / "text_encoder" / "adapter_model.bin")
    broken = peft_folders(tmp_path / "broken") / "unet" / "adapter_model.safetensors"
    broken.unlink()
    broken.symlink_to("nowhere")
    for given, says in (
        ("empty.safetensors", "empty.safetensors is empty"),
        ("folder", "folder holds none of adapter_model.safetensors, pytorch_lora_weights.safetensors"),
        ("peft", "text_encoder holds no adapter_model.safetensors; pickled weights are never opened"),
        ("broken/unet", "unet/adapter_model.safetensors cannot be read: No such file"),
    ):
        with pytest.raises(errors.InvalidRequest, match=rf"path: .*{re.escape(says)}") as caught:
            read_lora(tmp_path / given)
        assert [violation.field for violation in caught.value.violations] == ["path"]


async def test_a_path_that_is_not_here_may_be_one_of_the_stores_machine(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    there = lora_file(root)
    imports = ImportConfig(root=str(root))
    async with running_gateway() as gateway, lora_store(gateway, tmp_path / "store", imports=imports) as store:
        added = await run_at(gateway, "loras", "add", "ink", there.name, "--base", "miniature")
        assert (added.exit_code, await _names(store)) == (0, ["ink"])
        absent = await run_at(gateway, "loras", "add", "ink", "typo", "--base", "miniature")
        assert (absent.exit_code, "either: there is no such file or folder" in absent.stderr) == (2, True)


async def test_a_refusal_in_the_middle_of_an_upload_is_heard(house: House, client: AsyncClient, tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(48 << 20)
    for _ in range(3):
        with pytest.raises(errors.InvalidRequest, match="these base models"):
            await client.add_lora("large", path, base="fourth")
    with pytest.raises(errors.BadLora):
        await client.add_lora("large", path, base="other")


async def test_a_folder_with_one_for_each_component_is_brought_as_it_is(
    house: House, client: AsyncClient, tmp_path: Path
) -> None:
    folder = peft_folders(tmp_path / "peft")
    single = await _run(house, "add", "one", folder / "unet", "--base", "miniature")
    assert "one is ready for miniature: 1 module of rank 2, " in single.stdout
    added = await _run(house, "add", "two", folder, "--base", "miniature")
    assert re.fullmatch(r"two is ready for miniature: 2 modules of rank 3, .*\n", added.stdout), added.stderr
    lora = await client.lora("two")
    assert (lora.format, 0 < lora.text_bytes < lora.size_bytes) == ("PEFT", True)


async def test_the_command_adds_a_lora_in_part_if_it_is_told_to(
    house: House, client: AsyncClient, tmp_path: Path
) -> None:
    tensors = load_file(lora_file(tmp_path, seed=2))
    other = {f"lora_unet_elsewhere.lora_{part}.weight": torch.ones(2, 2) for part in ("up", "down")}
    path = save({**tensors, **other}, tmp_path / "partial.safetensors")
    refused = await _run(house, "add", "pastel", path, "--base", "miniature")
    assert "match nothing in the base model" in refused.stderr
    added = await _run(house, "add", "pastel", path, "--base", "miniature", "--allow-partial")
    says = "1 layer of its file matches nothing in the model and is ignored: lora_unet_elsewhere\n"
    assert says in added.stderr
    assert "LoRA, in part" in (await _run(house)).stdout
    assert "lora_unet_elsewhere" in (await _run(house, "show", "pastel")).stdout
    assert (await client.lora("pastel")).ignored == ("lora_unet_elsewhere",)


async def test_loras_of_stable_diffusion_3_are_added_for_their_own_base(house: House, tmp_path: Path) -> None:
    folder = family_model("SD 3.5")
    path = kohya_file(random_lora(folder, seed=1), tmp_path)
    async with lora_store(house.gateway, tmp_path / "annex", name="second", bases={"sd3": str(folder)}):
        added = await _run(house, "add", "ink3", path, "--base", "sd3")
        assert re.fullmatch(r"ink3 is ready for sd3: [0-9]+ modules of rank 2, .*\n", added.stdout), added.stderr
        assert "It is for Stable Diffusion 3: all layers of its file match the model" in added.stderr
        says = "Stable Diffusion 3, and the base model is SDXL: "
        assert f"the LoRA is for {says}" in (await _run(house, "add", "b", path, "--base", "miniature")).stderr
        name = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"
        factors = {f"{name}.lora_down.weight": torch.ones(2, 2048), f"{name}.lora_up.weight": torch.ones(640, 2)}
        other = save(factors, tmp_path / "sdxl.safetensors")
        refused = (await _run(house, "add", "c", other, "--base", "sd3")).stderr
        assert "the LoRA is for SDXL, and the base model is Stable Diffusion 3: " in refused
        embedding = save({"clip_l": torch.ones(1, 32), "clip_g": torch.ones(1, 32)}, tmp_path / "toy.safetensors")
        refused = (await _run(house, "add", "toy", embedding, "--base", "sd3")).stderr
        assert "it is an embedding (textual inversion), and none are served with Stable Diffusion 3" in refused


async def test_the_command_adds_lists_and_shows_an_embedding(house: House, tmp_path: Path) -> None:
    tensors = {name: torch.ones(3, 64) for name in ("clip_l", "clip_g")}
    path = save(tensors, tmp_path / "toy.safetensors")
    added = await _run(house, "add", "toy", path, "--base", "miniature", "--trigger", "<toy>")
    assert added.stdout == "toy is ready for miniature: an embedding of 3 vectors, which <toy> stands for in prompts\n"
    assert 'Draw with it: bottega generate "... <toy> ..." --lora toy\n' in added.stderr
    assert next(line.split() for line in (await _run(house)).stdout.splitlines() if "toy" in line)[:3] == [
        "toy",
        "miniature",
        "embedding",
    ]
    shown = (await _run(house, "show", "toy")).stdout
    for fact in ("kind", "embedding", "token", "<toy>", "vectors"):
        assert fact in shown
    assert "may be late" not in shown
