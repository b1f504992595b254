"""What is done to the LoRA store: killed while a worker loads from it, and started again at another address."""

from __future__ import annotations

import random
import time

from bottega.client import Picture
from tests.chaos.scene import Drawing, Scene
from tests.samples.lora_files import Part, base_shapes, kohya, save

STEPS = 20
LORA = "ink"
# The LoRA below takes about a second: long enough to be killed in.
BYTES_PER_S = 150_000
# A kill has landed when loading took longer by this: a store needs a second to be there again.
_LATER_S = 0.4


def kill_lora_stores(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 while a LoRA is loaded, until so many kills have landed; a picture without LoRAs is drawn beside it.

    Both are as when nothing happens. The scene's workers keep no LoRA that nobody waits for: each time it is loaded.
    """
    keep(scene)
    styled, plain = (drawing.picture(scene.tally) for drawing in (_styled(scene), _plain(scene)))
    assert styled is not None, scene.tally.faults
    assert plain is not None, scene.tally.faults
    for _ in scene.tally.tries("kills", times):
        pictures = _disturbed(scene, after_s=rng.uniform(0.1, 0.9) * _load_s(styled))
        for picture, undisturbed in zip(pictures, (styled, plain), strict=True):
            if picture is None:
                return
            scene.tally.different_images += picture.data != undisturbed.data
        assert pictures[0] is not None
        if _load_s(pictures[0]) > _load_s(styled) + _LATER_S:
            scene.tally.count("kills")
            scene.tally.most("longest_load_s", round(_load_s(pictures[0]), 2))


def keep(scene: Scene) -> None:
    """Starts the store and brings it a LoRA."""
    scene.start_loras(BYTES_PER_S)
    parts = {
        ("unet", path): Part(rank=4, alpha=2.0)
        for path in base_shapes("unet")
        if path.endswith(("to_q", "to_k", "to_v"))
    }
    scene.client.add_lora(LORA, save(kohya(parts)[0], scene.folder / "ink.safetensors"))


def _disturbed(scene: Scene, *, after_s: float) -> tuple[Picture | None, Picture | None]:
    """With the LoRA and without; the store dies so long after both have begun."""
    styled = _styled(scene)
    styled.wait_for_step(0)
    plain = _plain(scene)
    time.sleep(after_s)
    scene.worker("loras").kill()
    booting = scene.boot_loras(BYTES_PER_S)
    pictures = styled.picture(scene.tally), plain.picture(scene.tally)
    booting.result()
    return pictures


def _styled(scene: Scene) -> Drawing:
    return Drawing(scene.client, seed=1, steps=STEPS, options={**scene.options, "lora": [LORA]})


def _plain(scene: Scene) -> Drawing:
    return Drawing(scene.client, seed=1, steps=STEPS, options=scene.options)


def _load_s(picture: Picture) -> float:
    return picture.provenance.loras[0].load_s
