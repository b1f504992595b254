"""A LoRA in and out again: Diffusers' load, fuse, unfuse and unload against ours fetched, patched and restored.

Ours goes where a worker's engine would put it, with what its self-check has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter

from bottega.addons.loras.engine import LoraAtScale, LoraRef
from load.bench.framework import seconds_of
from load.bench.local_loras import LocalLoras
from load.bench.lora_files import LoraFiles, random_lora
from load.gpu_report.report import Figure
from load.gpu_report.rig import Rig, is_installed
from load.gpu_report.sides import our_runtime, stock_pipeline
from load.gpu_report.timing import finish, give_back
from tests.support.engines import lora_weights

# Of one LoRA's file to be mapped and hashed.
_FETCH_S = 60.0
# Attention's LoRA of rank 128 has 354 MiB in SDXL.
WANTED_MS = {"patch": 60.0, "restore": 10.0}

Stages = Mapping[str, Callable[[], object]]


def measure(rig: Rig) -> Sequence[Figure]:
    """Time both sides for each rank; Diffusers' where PEFT is installed."""
    folder = rig.folder / f"loras-{rig.size.name}"
    folder.mkdir(exist_ok=True)
    files = {rank: random_lora(rig.model, folder, seed=rank, rank=rank) for rank in rig.size.lora_ranks}
    ours = _ours(rig, files)
    theirs = _theirs(rig, files) if is_installed("peft") else {}
    largest = max(files)
    figures = []
    for rank, lora in files.items():
        about = f"rank {rank}, {lora.size_bytes / 2**20:.0f} MiB"
        group = f"A LoRA of {about}: milliseconds"
        for name, seconds in {**ours[rank], **theirs.get(rank, {})}.items():
            at_most = WANTED_MS.get(name) if rank == largest else None
            figure = Figure(f"{name}_ms_{rank}", f"{name}, {about}", seconds * 1e3, "ms", group, at_most=at_most)
            figures.append(rig.wanted(figure))
    return figures


def _ours(rig: Rig, files: Mapping[int, LoraFiles]) -> dict[int, dict[str, float]]:
    taken: dict[int, dict[str, float]] = {}
    by_digest = {lora.digest: lora.ours for lora in files.values()}
    with our_runtime(rig) as runtime, LocalLoras(by_digest) as source:
        weights = lora_weights(runtime.engine)
        for rank, lora in files.items():
            rounds: list[dict[str, float]] = []
            for _ in range(rig.size.rounds + 1):  # the first one has the copies made that restoring needs
                spent, began_s = {}, perf_counter()
                handle = source.begin(LoraRef(name="report", digest=lora.digest))
                while not handle.ready:
                    source.settle([handle], _FETCH_S)
                layers = {"unet": handle.layers("unet")}
                spent["fetch"], began_s = perf_counter() - began_s, perf_counter()
                weights.put_in_denoiser(
                    weights.denoiser_set([LoraAtScale(digest=lora.digest, scale=1.0, layers=layers)])
                )
                finish(rig.device)
                spent["patch"], began_s = perf_counter() - began_s, perf_counter()
                weights.put_in_denoiser(None)
                finish(rig.device)
                spent["restore"] = perf_counter() - began_s
                source.close([handle])
                rounds.append(spent)
            weights.restore()
            taken[rank] = _medians(rounds[1:])
    return taken


def _theirs(rig: Rig, files: Mapping[int, LoraFiles]) -> dict[int, dict[str, float]]:
    give_back(rig.device)
    pipeline = stock_pipeline(rig)
    taken = {}
    for rank, lora in files.items():
        stages: Stages = {
            "diffusers_load": partial(pipeline.load_lora_weights, lora.theirs.parent, weight_name=lora.theirs.name),
            "diffusers_fuse": pipeline.fuse_lora,
            "diffusers_unfuse": pipeline.unfuse_lora,
            "diffusers_unload": pipeline.unload_lora_weights,
        }
        rounds = [
            {name: seconds_of(partial(_finished, rig, run)) for name, run in stages.items()}
            for _ in range(rig.size.rounds + 1)
        ]
        taken[rank] = _medians(rounds[1:])
    return taken


def _finished(rig: Rig, run: Callable[[], object]) -> None:
    run()
    finish(rig.device)


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in rounds) for name in rounds[0]}
