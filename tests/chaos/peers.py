"""What is done to the other worker of a pair: it, or its engine alone, is killed in the middle of a picture."""

from __future__ import annotations

import random
import time

from tests.chaos.tally import Tally
from tests.support.stock import assert_same_image
from tests.support.waiting import wait_until
from tests.support.worker_pair import TIMEOUT_S, Drawn, WorkerPair

ENGINE = {"model": "miniature", "threads": 1, "max_rows": 4}
STEPS = 60
SEEDS = (1, 2, 3)


def kill_peers(pair: WorkerPair, tally: Tally, *, times: int, rng: random.Random) -> None:
    """kill -9 while rows are lent, until so many kills have landed; the image is the same every time.

    Figures: peer_kills, and of those, mid_step, with rows under way that the leader then computed itself.
    """
    alone: dict[int, Drawn] = {}
    # Some kills come before the peer was lent anything, or when the picture is finished.
    for _ in tally.tries("peer_kills", times, each=3):
        seed = rng.choice(SEEDS)
        if seed not in alone:
            alone[seed] = pair.alone("a", seed=seed, num_inference_steps=STEPS)
        wait_until(lambda: pair.draw("a").lent_steps > 0, "rows to be lent")
        before = pair.links("a")
        drawing = pair.begin("a", seed=seed, num_inference_steps=STEPS)
        time.sleep(rng.uniform(0.1, 0.6) * alone[seed].seconds("denoise"))
        _kill(pair, rng)
        drawn = drawing.result(TIMEOUT_S)
        _compare(drawn, alone[seed], tally)
        if drawn.taken_back_steps or 0 < drawn.lent_steps < STEPS:
            tally.count("peer_kills")
        if drawn.taken_back_steps:
            tally.count("mid_step")
        pair.wait_for_link("a", before)


def _kill(pair: WorkerPair, rng: random.Random) -> None:
    """The follower's engine, which its front replaces, or all of its worker, which is started again."""
    engine = pair.engine_of("b")
    if rng.random() < 0.5:
        engine.kill()
        return
    pair.worker("b").kill()
    pair.start("b")


def _compare(drawn: Drawn, alone: Drawn, tally: Tally) -> None:
    try:
        assert_same_image(drawn.pixels, alone.pixels)
    except AssertionError as error:
        tally.different_images += 1
        tally.faults.append(str(error))
