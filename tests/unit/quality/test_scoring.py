"""The scoring process: the oracle's shares through a real process, a CLIP's scores, and what it cannot score."""

from __future__ import annotations

import asyncio
import io
import random
import threading
from pathlib import Path

import PIL.Image
import pytest
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTextConfig, CLIPVisionConfig

from bottega.errors import InvalidRequest, Unavailable
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import Scene, Thing, caption, random_layout, render
from bottega.process.child import FramedPipe, open_pair
from bottega.quality.__main__ import main
from bottega.quality.clip import clip_scores, load_clip
from bottega.quality.scoring import ScoreAnswer, ScoreQuestion, scorer

SCENE = Scene(things=(Thing(shape="star", colour="red"),), ground="blue", size="big", place="left")


def _png(scene: Scene) -> bytes:
    file = io.BytesIO()
    render(random_layout(scene, random.Random(0))).save(file, format="PNG")
    return file.getvalue()


def test_the_oracles_score_is_the_share_of_the_prompt_that_the_picture_shows() -> None:
    async def scores() -> tuple[float, float]:
        async with scorer(None) as running:
            green = caption(SCENE).replace("blue", "green")
            return await running.score(caption(SCENE), _png(SCENE)), await running.score(green, _png(SCENE))

    assert asyncio.run(scores()) == pytest.approx((1.0, 5 / 6))


def test_what_cannot_be_scored_is_said_and_the_next_picture_is_scored() -> None:
    async def ask() -> float:
        async with scorer(None) as running:
            with pytest.raises(InvalidRequest, match="a dog on the moon"):
                await running.score("a dog on the moon", _png(SCENE))
            with pytest.raises(InvalidRequest, match="cannot identify image"):
                await running.score(caption(SCENE), b"no picture")
            return await running.score(caption(SCENE), _png(SCENE))

    assert asyncio.run(ask()) == 1.0


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next_ones() -> None:
    async def ask() -> None:
        async with scorer(None) as running:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await running.score(caption(SCENE), _png(SCENE))
            green = caption(SCENE).replace("blue", "green")
            with pytest.raises(Unavailable, match="did not answer an earlier request"):
                await running.score(green, _png(SCENE))

    asyncio.run(ask())


def test_a_clip_scores_by_its_own_towers(tmp_path: Path) -> None:
    _small_clip(tmp_path / "clip")
    ours, theirs = open_pair()
    serving = threading.Thread(target=main, args=(["--fd", str(theirs.detach()), "--clip", str(tmp_path / "clip")],))
    serving.start()
    pipe = FramedPipe(ours)

    assert ScoreAnswer.unpacked(pipe.recv() or b"") == ScoreAnswer()
    pipe.send(ScoreQuestion(prompt=caption(SCENE), picture=_png(SCENE)).packed())
    answer = ScoreAnswer.unpacked(pipe.recv() or b"")
    pipe.close()
    serving.join(10)

    wanted = clip_scores(load_clip(tmp_path / "clip"), [PIL.Image.open(io.BytesIO(_png(SCENE)))], [caption(SCENE)])
    assert answer.score == pytest.approx(float(wanted[0]))
    assert not serving.is_alive()


def _small_clip(folder: Path) -> None:
    """Random towers, with the miniature's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "tokenizer_2")
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    CLIPModel(
        CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
