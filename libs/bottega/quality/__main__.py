"""A scoring process: `python -m bottega.quality --fd N` answers the frames of scoring.py until its pipe closes."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean

import PIL.Image

from bottega.miniature.scenes import read_caption
from bottega.process.child import FramedPipe
from bottega.quality.scoring import ScoreAnswer, ScoreQuestion

Score = Callable[[str, PIL.Image.Image], float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer requests until the other end of the pipe closes.

    The first answer says that the process is ready, or why it cannot score.
    """
    parser = argparse.ArgumentParser(description="Bottega's scoring process; other processes start it")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument(
        "--clip", type=Path, help="folder of a CLIP model of transformers; default: the embedded model's own scorer"
    )
    options = parser.parse_args(arguments)
    with closing(FramedPipe.from_fd(options.fd)) as pipe:
        _serve(pipe, options.clip)


def _serve(pipe: FramedPipe, clip: Path | None) -> None:
    try:
        score = _by_clip(clip) if clip else _by_oracle()
    except (ImportError, OSError, ValueError) as error:
        pipe.send(ScoreAnswer(error=f"{type(error).__name__}: {error}").packed())
        return
    pipe.send(ScoreAnswer().packed())
    while (frame := pipe.recv()) is not None:
        pipe.send(_answer(score, ScoreQuestion.unpacked(frame)).packed())


def _answer(score: Score, question: ScoreQuestion) -> ScoreAnswer:
    try:
        return ScoreAnswer(score=score(question.prompt, PIL.Image.open(io.BytesIO(question.picture))))
    except (OSError, ValueError) as error:
        return ScoreAnswer(error=str(error))


def _by_oracle() -> Score:
    """Return a scorer for the embedded model: the share of the prompt's statements that the picture shows, 0 to 1."""
    from bottega.quality import oracle

    def score(prompt: str, picture: PIL.Image.Image) -> float:
        scene = read_caption(prompt)
        if scene is None:
            raise ValueError(f"the embedded model's scorer needs whole sentences of its grammar, not {prompt!r}")
        return mean(oracle.marks(oracle.read(picture), scene).values())

    return score


def _by_clip(folder: Path) -> Score:
    """Return a scorer for any model: 100 times the cosine of the embeddings of picture and prompt, at least 0."""
    if not (folder / "config.json").is_file():  # checked before torch is imported
        raise ValueError(f"{folder} is not a CLIP for transformers: it has no config.json")
    import transformers

    from bottega.quality.clip import clip_scores, load_clip

    transformers.logging.disable_progress_bar()
    clip = load_clip(folder)
    return lambda prompt, picture: float(clip_scores(clip, [picture], [prompt])[0])


if __name__ == "__main__":
    main()
