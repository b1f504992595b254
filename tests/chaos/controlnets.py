"""What is done to ControlNet servers: killed, or their engines, inside a session at a random step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from diffusers import UNet2DConditionModel

from bottega.client import ControlNet
from bottega.miniature import WEIGHTS
from tests.chaos.scene import JOIN_TIMEOUT_S, Drawing, Scene
from tests.chaos.workers import SEEDS
from tests.samples.controlnets import control_image, random_controlnet, save
from tests.support.running_controlnets import png
from tests.support.waiting import wait_until

STEPS = 60
# One is killed, one takes over, one starts again.
SERVERS = ("x", "y", "z")


def kill_controlnets(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 at a random step, until so many kills have landed inside a session."""
    nets = host(scene, SERVERS)
    scene.options["controlnets"] = [control()]
    for _ in scene.tally.tries("kills", times):
        wait_until(lambda: len(scene.hosting()) >= 2, "two ControlNet servers")
        drawing, name = _caught(scene, rng)
        whole = rng.random() < 0.5
        if whole:
            scene.worker(name).kill()
            scene.boot_controlnets(name, nets)
        else:
            _kill_engine(scene, name)
        picture = scene.check(drawing)
        if picture is None:
            return
        ran = list(picture.provenance.controlnets[0].servers)
        if picture.provenance.attempts < 2 and len(ran) < 2:
            continue
        scene.tally.count("kills")
        scene.tally.count("servers_killed" if whole else "engines_killed")
        if picture.provenance.attempts > 1:
            scene.tally.count("kills_with_another_attempt")


def host(scene: Scene, servers: Sequence[str]) -> Mapping[str, Path]:
    """Starts servers that all host the same; the folders of their ControlNets, by name."""
    unet = UNet2DConditionModel.from_pretrained(WEIGHTS / "unet", use_safetensors=True, local_files_only=True)
    nets = save({"edges": random_controlnet(unet, 1)}, scene.folder / "nets")
    for booting in [scene.boot_controlnets(name, nets) for name in servers]:
        booting.result(JOIN_TIMEOUT_S)
    return nets


def control() -> ControlNet:
    """What a picture asks of these servers."""
    return ControlNet("edges", png(control_image(1)), controlnet_conditioning_scale=0.8)


def _kill_engine(scene: Scene, name: str) -> None:
    try:
        scene.engine_of(name).kill()
    except psutil.NoSuchProcess:
        return  # it did not land, as will be seen


def _caught(scene: Scene, rng: random.Random) -> tuple[Drawing, str]:
    """A picture that is being drawn, at a random step, and the server that runs its ControlNet."""
    while True:
        seed = rng.choice(SEEDS)
        scene.undisturbed(seed, STEPS)
        wait_until(lambda: not any(scene.hosting().values()), "the sessions before to end")
        drawing = scene.draw(seed=seed, steps=STEPS)
        if drawing.wait_for_step(rng.randint(1, STEPS - 15)) is not None:
            running = [name for name, sessions in scene.hosting().items() if sessions]
            if running:
                return drawing, running[0]
        scene.check(drawing)
