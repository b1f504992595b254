"""An engine process without a model: speaks the engine's frames and does what the prompt says.

Words of a prompt: "slow" takes 20 ms a step and "slower" 100, "hang" falls silent for ever, "stall" makes no step any
more but says that it lives, "compile" runs a compiler for two seconds before its first step, "die" exits at once. A
picture is its input image, or one flat colour by seed and index; an edit is flat everywhere. One that is "controlled"
is its first control image.

Names of models: "broken" exits at once, as "unusable" does with another status; "slow" says for two seconds how far it
is before it is ready, "stuck" says so once and then nothing more. A path names a file that has one of them, or is
"broken" where there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import threading
import time
from pathlib import Path

from bottega.errors import ConfigError
from bottega.process.child import FramedPipe
from bottega.v1 import engine_pb2, fleet_pb2, image_pb2, tensor_pb2, worker_pb2
from bottega.v1.hosted_pb2 import Hosted

# Longer than a test's engine may be silent or make no step.
_COMPILING_WORDS, _COMPILING_S = 4, 0.5

MODEL = image_pb2.Model(name="scripted", model_hash="abc", dtype="float32", default_width=64, default_height=64)
BEAT_S = 0.1
# What is kept of a picture, where it is to be kept; of an edit, what was kept of its image, turned round.
LATENTS = bytes(range(256)) * 3000


class Drawing:
    """One attempt under way."""

    def __init__(self, start: engine_pb2.EngineStart) -> None:
        self.start = start
        self.steps = start.request.spec.num_inference_steps
        self.done = int(start.request.checkpoint or b"0")

    @property
    def words(self) -> list[str]:
        return self.start.request.spec.prompt.split()

    @property
    def attempt(self) -> worker_pb2.AttemptId:
        return self.start.request.attempt


class Engine:
    def __init__(self, channel: FramedPipe) -> None:
        self.channel = channel
        self.drawings: dict[str, Drawing] = {}
        self.backlog = 0
        self.lora_stores: list[str] = []
        self.cancels = 0
        self.turns = 0

    def say(self, **event: object) -> None:
        self.channel.send(engine_pb2.EngineEvent(**event).SerializeToString())  # type: ignore[arg-type]

    def obey(self, command: engine_pb2.EngineCommand) -> None:
        match command.WhichOneof("command"):
            case "start":
                drawing = Drawing(command.start)
                self.drawings[drawing.attempt.job_id] = drawing
                self.say(
                    started=engine_pb2.EngineStarted(
                        attempt=drawing.attempt, steps_total=drawing.steps, steps_resumed=drawing.done
                    )
                )
            case "cancel":
                self.cancels += 1
                del self.drawings[command.cancel.attempt.job_id]
            case "backlog":
                self.backlog = command.backlog.requests
            case "services":
                self.lora_stores = [f"{store.name} at {store.address}" for store in command.services.services]
            case "preview":
                if command.preview.attempt.job_id in self.drawings:
                    self.drawings[command.preview.attempt.job_id].start.request.preview = True

    def turn(self) -> None:
        if any("stall" in drawing.words for drawing in self.drawings.values()):
            time.sleep(0.02)
            return
        self.turns += 1
        for drawing in list(self.drawings.values()):
            if "die" in drawing.words:
                os._exit(9)
            while "hang" in drawing.words:
                time.sleep(1)
            if "compile" in drawing.words and not drawing.done:
                for _ in range(_COMPILING_WORDS):
                    time.sleep(_COMPILING_S)
                    self.say(compiling=engine_pb2.EngineCompiling())
            if drawing.done < drawing.steps:
                self.step(drawing)
            else:
                self.finish(drawing)
        words = {word for drawing in self.drawings.values() for word in drawing.words}
        time.sleep(0.1 if "slower" in words else 0.02 if "slow" in words else 0.0)

    def step(self, drawing: Drawing) -> None:
        drawing.done += 1
        progress = engine_pb2.EngineProgress(attempt=drawing.attempt, steps_done=drawing.done)
        if drawing.start.request.preview:
            progress.preview.CopyFrom(flat(8, 8, drawing.done))
        self.say(progress=progress)
        self.say(
            checkpoint=engine_pb2.EngineCheckpoint(
                attempt=drawing.attempt, steps_done=drawing.done, checkpoint=str(drawing.done).encode()
            )
        )

    def finish(self, drawing: Drawing) -> None:
        spec = drawing.start.request.spec
        for index in range(spec.num_images or 1):
            pixels = flat(spec.width, spec.height, spec.seed + index)
            if drawing.start.image.data and not drawing.start.mask.data:
                pixels = drawing.start.image
            if "controlled" in drawing.words:
                pixels = drawing.start.control_images[0].pixels
            picture = engine_pb2.EnginePicture(
                attempt=drawing.attempt, index=index, pixels=pixels, handed_over_s=time.monotonic()
            )
            self.say(picture=picture)
            if spec.keep_for_editing or drawing.start.request.kept:
                latents = drawing.start.request.kept[::-1] or LATENTS
                self.say(kept=engine_pb2.EngineKept(attempt=drawing.attempt, index=index, kept=latents))
        done = engine_pb2.EngineDone(attempt=drawing.attempt)
        done.provenance.model_hash = MODEL.model_hash
        done.provenance.mean_group_requests = 1
        for net, image in zip(spec.controlnets, drawing.start.control_images, strict=True):
            done.provenance.controlnets.add(name=net.name, image_digest=image.digest)
        self.say(done=done)
        del self.drawings[drawing.attempt.job_id]

    def beat(self) -> None:
        running = [
            fleet_pb2.RunningAttempt(attempt=d.attempt, steps_left=d.steps - d.done) for d in self.drawings.values()
        ]
        # What it was told is reported back, for tests to see: LoRA stores as LoRAs; the backlog, and 100 for each
        # cancel, as fixed_s.
        fixed_s = 100.0 * self.cancels + self.backlog
        times = [
            fleet_pb2.StepTime(latent_height=16, latent_width=16, rows=rows, seconds=0.02 + rows / 1e5)
            for rows in (2, 16)
        ]
        beat = engine_pb2.EngineBeat(turns=self.turns, running=running, step_times=times, fixed_s=fixed_s)
        beat.hosted.extend(Hosted(kind="loras", digest=told) for told in self.lora_stores)
        self.say(beat=beat)


def flat(width: int, height: int, level: int) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_UINT8, shape=(height, width, 3), data=bytes([level % 256]) * (width * height * 3)
    )


def load(engine: Engine, *, steps: int) -> None:
    """Say so many times that a model of 5 GB is loaded, a little more of it each time."""
    for step in range(steps):
        progress = fleet_pb2.StartProgress(stage="loading unet", done_bytes=step * 10**8, total_bytes=5 * 10**9)
        engine.say(starting=engine_pb2.EngineStarting(progress=progress))
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--config-json", type=json.loads)
    parser.add_argument("--trials")
    parser.add_argument("--max-quiet-s")
    arguments = parser.parse_args()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    model = arguments.config_json["model"]
    if model.startswith("/"):
        model = Path(model).read_text() if Path(model).exists() else "broken"
    if model == "unusable":
        raise SystemExit(ConfigError.exit_status)
    if model == "broken":
        raise SystemExit(3)
    channel = FramedPipe.from_fd(arguments.fd)
    commands: queue.Queue[engine_pb2.EngineCommand] = queue.Queue()

    def listen() -> None:
        while (frame := channel.recv()) is not None:
            commands.put(engine_pb2.EngineCommand.FromString(frame))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    engine = Engine(channel)
    if model in {"slow", "stuck"}:
        load(engine, steps=20 if model == "slow" else 1)
    if model == "stuck":
        time.sleep(60)
    engine.say(ready=engine_pb2.EngineReady(model=MODEL, device="cpu"))
    beaten_s = 0.0
    while True:
        try:
            engine.obey(commands.get(timeout=0.0 if engine.drawings else 0.05))
        except queue.Empty:
            engine.turn()
        if time.monotonic() - beaten_s > BEAT_S:
            beaten_s = time.monotonic()
            engine.beat()


if __name__ == "__main__":
    main()
