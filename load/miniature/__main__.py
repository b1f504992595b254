"""Trains the embedded model, and exports what a training holds: `python -m load.miniature`."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bottega.errors import ConfigError
from bottega.miniature import WEIGHTS
from bottega.state_folder import state_folder

if TYPE_CHECKING:
    from load.miniature.training.train import Outcome

_NICE = 19


def main() -> None:
    """Read the command line and run it."""
    options = _parser().parse_args()
    os.nice(_NICE - os.nice(0))
    if os.environ.get("OMP_WAIT_POLICY") != "PASSIVE":
        # Read when the library is loaded: too late to be set by a process that has begun with another.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        os.execve(sys.executable, [sys.executable, "-m", "load.miniature", *sys.argv[1:]], environment)
    try:
        if options.command == "export":
            _export(options)
        else:
            _train(options)
    except ConfigError as error:
        sys.exit(str(error))


def _train(options: argparse.Namespace) -> None:
    from load.miniature.training.train import Training, train, train_all

    training = Training(
        folder=options.folder,
        steps=options.steps,
        minutes=options.minutes,
        pictures=options.pictures,
        rows=options.rows,
        start=options.start,
        fresh=options.fresh,
        compiled=options.compile,
        device=options.device,
        look_every=options.look_every,
    )

    def stop(*_: object) -> None:
        training.stopped.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once

    signal.signal(signal.SIGTERM, stop)
    for outcome in [train(options.stage, training)] if options.stage else train_all(training):
        print(f"{outcome.stage}: {_sentence(outcome, options.folder / 'model')}")


def _sentence(outcome: Outcome, model: Path) -> str:
    if outcome.used_by:
        return f"nothing to do: its {outcome.steps} steps are done, and {', '.join(outcome.used_by)} trained on them"
    return f"{outcome.steps} steps; the model is in {model}"


def _export(options: argparse.Namespace) -> None:
    from load.miniature.training.train import export

    print(f"{options.stage}: {export(options.stage, options.folder, options.target)} steps; {options.target}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m load.miniature", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    stages = ["vae", "text", "unet", "vision", "edges", "layout", "striped", "checked", "dusk", "decoder"]
    stages += ["dit", "dit-layout", "dit-striped"]

    train = commands.add_parser("train", help="run one stage, or the recipe; SIGTERM stops it, and it goes on there")
    train.add_argument("stage", nargs="?", choices=stages, help="without one: all before decoder in this order")
    _add_folder(train)
    train.add_argument("--steps", type=int, default=0, help="of the stage over all its runs; 0 is its own number")
    train.add_argument("--minutes", type=float, default=math.inf, help="of this run; the next one goes on")
    train.add_argument("--pictures", type=int, default=48_000, help="rendered for training")
    train.add_argument("--rows", type=int, default=0, help="of a batch; 0 is the stage's own number")
    train.add_argument("--start", type=Path, default=WEIGHTS, help="model to begin a new training with")
    train.add_argument("--fresh", action="store_true", help="begin a new training, or a new stage, with random weights")
    train.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one")
    train.add_argument(
        "--compile", action="store_true", help="compile the UNet or the transformer: minutes once, then quicker steps"
    )
    train.add_argument("--look-every", type=int, default=0, help="steps between readings of 64 pictures by the oracle")

    export = commands.add_parser("export", help="write a model with what a stage's checkpoint holds by now")
    export.add_argument("target", type=Path)
    export.add_argument("--stage", choices=stages, default="unet")
    _add_folder(export)
    return parser


def _add_folder(parser: argparse.ArgumentParser) -> None:
    default = state_folder() / "training"
    parser.add_argument("--folder", type=Path, default=default, help="all that must outlive a run (%(default)s)")


if __name__ == "__main__":
    main()
