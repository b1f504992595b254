"""Stages as roles: a worker without text encoders and VAE decoder draws what a whole one draws, by links."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import PIL.Image
import pytest
import torch

from bottega import kinds
from bottega.addons.loras.engine.addon import EngineLoras
from bottega.device.heartbeat import Heartbeat
from bottega.device_links.tensor_messages import TensorMessage
from bottega.engine.addon import EngineAddOn, EngineAddOnContext
from bottega.engine.engine import Engine
from bottega.engine.events import JobAdvanced
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import EmbeddingSpec, ResolvedSpec
from bottega.errors import BottegaError, InternalError, PeerDead, Poisoned, TooLarge, Unavailable
from bottega.fair_order import Share
from bottega.model.loading import load_model
from bottega.model.model import Model
from bottega.model.text_encoders import TextCache
from bottega.model.vae import VaeSettings
from bottega.model_files.family_names import UNET
from bottega.process.child import FramedPipe, open_pair
from bottega.transport import LinkCounters, ServiceOffer
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.worker.config import EngineConfig, PeerLinksConfig
from bottega.worker.stages import client
from bottega.worker.stages.addons import RemoteDecoders, stage_addons
from bottega.worker.stages.client import StageClient, StageLink
from bottega.worker.stages.messages import refused_message
from bottega.worker.stages.server import StageLinks, StageLoop, StageQueue, StageTask
from tests.samples.edits import box_mask, edit_order
from tests.samples.engine_loras import TEXT, LorasByHand, lora_spec, random_layers
from tests.samples.small_model import SIZE, small_model
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.offers import OffersAtOnce
from tests.support.waiting import wait_until

SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background",
    negative_prompt="green",
    num_inference_steps=3,
    width=SIZE,
    height=SIZE,
    seed=3,
)
LIMITS = EngineLimits(max_rows=4, progress_interval_s=0.0, checkpoint_interval_s=0.0)
PICTURE = torch.randint(0, 255, (SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@functools.cache
def loaded(*roles: str, vae: VaeSettings | None = None) -> Model:
    device, dtype = torch.device("cpu"), torch.float32
    return load_model(small_model(), name="small", device=device, dtype=dtype, roles=roles, vae=vae)


class StageWorker:
    """A worker with one role: its links, and a thread that computes while nobody holds the `gate`.

    While `hold` is set, the request that it computes takes until its connection ends.
    """

    def __init__(self, role: str, model: Model, socket: Path) -> None:
        links = PeerLinksConfig(listen="", socket=str(socket))
        config = EngineConfig(model="miniature", roles=(role,), links=links)  # type: ignore[arg-type]
        self.links = StageLinks(config, model)
        self.gate = threading.Lock()
        self.hold = threading.Event()
        self.computed = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.002):  # so that somebody else can take the gate
            with self.gate:
                if (task := self.links.tasks.next(0.02)) is None:
                    continue
                task.link.report_begun(task.number)
                while self.hold.is_set() and task.link.connection.is_open:
                    time.sleep(0.002)
                if not task.link.connection.is_open:
                    continue
                try:
                    answer = task.compute()
                except BottegaError as error:
                    answer = refused_message(task.number, error)
                self.computed += 1
                task.link.connection.send(answer)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(5)
        self.links.close()


class Offers(OffersAtOnce):
    """Offers of the stage workers by their names, which are their addresses too."""

    def __init__(self, workers: Mapping[str, StageWorker]) -> None:
        super().__init__()
        self.workers = workers

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        if address not in self.workers:
            raise Unavailable("it is away")
        return ServiceOffer(offer=self.workers[address].links.offer("den", link_id, caller=""), service=address)


def with_loras(model: Model, source: LorasByHand) -> EngineLoras:
    """LoRAs that are computed beside the weights, which other tests use."""
    return EngineLoras(model, source, patches=False)


class Parted:
    """An engine without text encoders and decoder, and its stage workers by name. roles: its own."""

    def __init__(
        self,
        folder: Path,
        *,
        vae: VaeSettings | None = None,
        roles: tuple[str, ...] = ("denoise",),
        loras: LorasByHand | None = None,
    ) -> None:
        encoder, decoder = replace(loaded("encode"), prompt_cache=TextCache(1 << 20)), loaded("decode", vae=vae)
        self.workers = {
            "enc": StageWorker("encode", encoder, folder / "enc.sock"),
            "dec-1": StageWorker("decode", decoder, folder / "dec-1.sock"),
            "dec-2": StageWorker("decode", decoder, folder / "dec-2.sock"),
        }
        model = loaded(*roles)
        context = EngineAddOnContext(
            sections=(),
            fixed_rows=0,
            model=model,
            offers=Offers(self.workers),
            counters=LinkCounters(),
            heartbeat=Heartbeat(),
        )
        stages = stage_addons([kind for kind in kinds.STAGES if kind not in roles], context)
        self.addons: tuple[EngineAddOn, ...] = (*stages, *([with_loras(model, loras)] if loras else []))
        self.engine = ManualEngine(Engine(model, LIMITS, addons=self.addons))
        self.set_services("enc", "dec-1", "dec-2")

    def set_services(self, *names: str) -> None:
        """Tell the engine which stage workers there are."""
        self.engine.engine.set_services(
            [
                ServiceAddress(kind=kinds.ENCODE if name == "enc" else kinds.DECODE, name=name, address=name)
                for name in names
            ]
        )

    def computed(self, *names: str) -> int:
        """Requests that these stage workers have answered."""
        return sum(self.workers[name].computed for name in names)

    def draw(self, order: EngineOrder) -> Drawing:
        drawing = self.engine.submit(order)
        self.engine.run()
        return drawing

    def stop(self) -> None:
        for addon in self.addons:
            addon.set_services(())
        for worker in self.workers.values():
            worker.stop()


@pytest.fixture(scope="module")
def whole() -> ManualEngine:
    return ManualEngine(Engine(loaded("encode", "denoise", "decode"), LIMITS))


@pytest.fixture
def parted(tmp_path: Path) -> Iterator[Parted]:
    made = Parted(tmp_path)
    yield made
    made.stop()


def orders() -> list[EngineOrder]:
    """Jobs of every kind that a worker without text encoders may get."""
    several = replace(SPEC, prompts=("a red star", "a green circle", "a red star"), num_images=3)
    weighted = replace(SPEC, prompt="a (green:1.4) circle BREAK on red", weighted=True, clip_skip=1)
    specs = [SPEC, several, weighted, replace(SPEC, guidance_scale=1.0), replace(SPEC, prompt="a star " * 60)]
    # Alone, because the widths of batches depend on measured times, and change the last bits.
    plain = [EngineOrder(key=key, spec=spec, preview=True, shared_turns=False) for key, spec in enumerate(specs)]
    return [*plain, EngineOrder(key="image", spec=replace(SPEC, strength=0.7), image=PICTURE, preview=True)]


def previews(drawing: Drawing) -> torch.Tensor:
    """All previews of a job, in their order."""
    shown = [event.preview for event in drawing.all(JobAdvanced)]
    return torch.stack([preview.int() for preview in shown if preview is not None])


def test_pictures_and_records_are_those_of_a_whole_worker(parted: Parted, whole: ManualEngine) -> None:
    for order in orders():
        wanted = whole.submit(order)
        whole.run()
        drawn = parted.draw(order)
        assert all((one == other).all() for one, other in zip(drawn.pixels, wanted.pixels, strict=True)), order.key
        ours, theirs = drawn.record.provenance, wanted.record.provenance
        assert (ours.truncations, ours.vae_dtype, ours.vae_tiled) == (
            theirs.truncations,
            theirs.vae_dtype,
            theirs.vae_tiled,
        )
        assert drawn.record.exact
        assert drawn.record.decoded_as_stock
        assert drawn.record.seconds["encode"] > 0
        assert drawn.record.seconds["decode"] > 0
        assert {span.service for span in drawn.trace.spans} >= {"enc"}
        assert all(one.equal(other) for one, other in zip(drawn.latents, wanted.latents, strict=True)), order.key
        if len(drawn.pixels) == 1:  # images of one job take turns in any order
            # The colours of previews are fitted by each engine.
            assert (previews(drawn) - previews(wanted)).abs().max() <= 1
    assert parted.workers["dec-1"].computed + parted.workers["dec-2"].computed == 8
    cache = parted.workers["enc"].links.model.prompt_cache
    assert cache.hits, "two jobs have the same prompts"
    misses = cache.misses
    parted.draw(EngineOrder(key="other", spec=SPEC, share=Share(tenant="other")))
    assert cache.misses == misses + 2


def test_weights_of_other_stages_are_not_loaded() -> None:
    def kib(model: Model) -> int:
        networks = (model.backbone.network, model.vae, *model.text_encoders)
        return sum(int(p.nbytes) for network in networks for p in network.parameters() if p.device.type != "meta") >> 10

    sizes = {role: kib(loaded(role)) for role in ("encode", "denoise", "decode")}
    together = kib(loaded("encode", "denoise", "decode"))
    assert abs(sum(sizes.values()) - together) <= 3
    assert all(0 < size < together for size in sizes.values())
    model = load_model(
        small_model(),
        name="small",
        device=torch.device("cpu"),
        dtype=torch.float32,
        roles=("decode",),
        prompt_cache_bytes=1 << 20,
    )
    assert "prompts" not in model.memory.reserved, "only text encoders fill the cache"


def decode_client(parted: Parted) -> StageClient:
    (decoders,) = [addon for addon in parted.addons if addon.kind == kinds.DECODE]
    assert isinstance(decoders, RemoteDecoders)
    return decoders.client


def lose(link: StageLink) -> None:
    """End a connection as the death of the stage worker does."""
    assert link._connection is not None
    assert link._connection.link is not None
    link._connection.link.end(PeerDead("killed"))


def asked_links(client: StageClient) -> list[StageLink]:
    return [link for link in client._links.values() if client.pending(link)]


def begin_decoding(parted: Parted, *orders: EngineOrder) -> list[Drawing]:
    """Draw until one decoder computes an image of these jobs, and the others wait."""
    drawn = [parted.engine.submit(order) for order in orders]
    client = decode_client(parted)
    for _ in range(1000):
        parted.engine.turn()
        if len(client._calls) == len(orders) and any(call.begun for call in client._calls.values()):
            return drawn
    raise AssertionError("nothing is decoded")


def test_a_lost_decoder_is_replaced_by_another_one(parted: Parted, whole: ManualEngine) -> None:
    wanted = whole.submit(EngineOrder(key="l", spec=SPEC))
    whole.run()
    client = decode_client(parted)
    for name in ("dec-1", "dec-2"):
        parted.workers[name].hold.set()
    (drawn,) = begin_decoding(parted, EngineOrder(key="l", spec=SPEC))
    (link,) = asked_links(client)
    asked = link.store.name
    lose(link)
    parted.workers["dec-2" if asked == "dec-1" else "dec-1"].hold.clear()
    parted.engine.run()
    assert (drawn.pixels[0] == wanted.pixels[0]).all()
    assert parted.workers[asked].computed == 0
    assert client.lost == 1
    assert client.answered == 1


def test_only_the_job_that_kills_decoders_is_poisoned(parted: Parted) -> None:
    parted.set_services("enc", "dec-1")
    decoder, client = parted.workers["dec-1"], decode_client(parted)
    decoder.hold.set()
    orders = [EngineOrder(key=key, spec=replace(SPEC, seed=key)) for key in range(3)]
    drawn = begin_decoding(parted, *orders)
    (killer,) = [number for number, call in client._calls.items() if call.begun]
    (link,) = asked_links(client)
    for death in (1, 2):
        lose(link)
        wait_until(lambda death=death: client.lost == death, "the loss is known")  # type: ignore[misc]
        if death == 1:
            wait_until(lambda: client._calls[killer].begun, "it is computed again")
    decoder.hold.clear()
    parted.engine.run()
    errors = [drawing.error for drawing in drawn if not drawing.pixels]
    assert [type(error) for error in errors] == [Poisoned]
    assert "2 workers with the role decode died while they computed this job" in errors[0].message
    assert client.answered == 2
    assert client.lost == 2


class AskingLink:
    """The connection of a worker whose requests are all wanted."""

    def __init__(self) -> None:
        self.connection = self
        self.sent: list[TensorMessage] = []

    def take(self, number: int) -> bool:
        return True

    def report_begun(self, number: int) -> None: ...

    def send(self, message: TensorMessage) -> None:
        self.sent.append(message)


def task(number: int, tenant: str = "", compute: Callable[[], TensorMessage] | None = None) -> StageTask:
    share = Share(tenant=tenant)
    return StageTask(link=AskingLink(), number=number, share=share, compute=compute or pytest.fail)  # type: ignore[arg-type]


def test_a_stage_worker_serves_tenants_in_turns() -> None:
    tasks = StageQueue()
    for number in range(4):
        tasks.put(task(number, "many"))
    served = []
    for turn in range(6):
        if turn == 1:
            tasks.put(task(10, "few"))
            tasks.put(task(11, "few"))
        found = tasks.next(0)
        assert found is not None
        served.append(found.number)
        tasks.charge(found.share, 1.0)
    assert served == [0, 10, 1, 11, 2, 3]
    assert tasks.next(0) is None


def test_a_stage_worker_that_fails_all_requests_ends(parted: Parted) -> None:
    def fail() -> TensorMessage:
        raise RuntimeError("broken")

    here, there = (FramedPipe(end) for end in open_pair())
    loop = StageLoop(here, parted.workers["enc"].links, Heartbeat(), max_quiet_s=0)
    for number in range(2):
        loop._compute(task(number, compute=fail))
    loop._compute(task(2, compute=lambda: refused_message(2, TooLarge("sound"))))
    failing = [task(number, compute=fail) for number in range(3)]
    for one in failing[:2]:
        loop._compute(one)
    with pytest.raises(RuntimeError, match="3 requests in a row have failed"):
        loop._compute(failing[2])
    assert all(cast(AskingLink, one.link).sent for one in failing), "each is answered"
    here.close()
    there.close()


def test_an_internal_error_of_a_decoder_is_tried_at_another_one(
    parted: Parted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int, latent: torch.Tensor) -> TensorMessage:
        raise InternalError("the engine failed")

    monkeypatch.setattr(parted.workers["dec-1"].links, "decode", fail)
    for key in range(3):
        assert parted.draw(EngineOrder(key=key, spec=SPEC)).pixels
    monkeypatch.setattr(parted.workers["dec-2"].links, "decode", fail)
    assert isinstance(parted.draw(EngineOrder(key=3, spec=SPEC)).error, InternalError)


def test_a_job_is_given_back_when_no_stage_worker_is_left(parted: Parted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PROVIDER_S", 0.1)
    parted.set_services("enc")
    error = parted.draw(EngineOrder(key="none", spec=SPEC)).error
    assert type(error) is Unavailable
    assert "no worker with the role decode" in error.message
    parted.set_services("dec-1")
    assert "no worker with the role encode" in parted.draw(EngineOrder(key="none", spec=SPEC)).error.message


def test_jobs_that_need_the_text_encoders_are_refused(parted: Parted) -> None:
    embedding = EmbeddingSpec(name="ink", digest="a" * 64, token="<ink>")
    edit = edit_order(SPEC, PIL.Image.fromarray(PICTURE.numpy()), box_mask((4, 4, 20, 20), SIZE, SIZE))
    for spec in (replace(SPEC, loras=(lora_spec("ink"),)), replace(SPEC, embeddings=(embedding,)), edit.spec):
        with pytest.raises(InternalError, match="worker without text encoders"):
            parted.engine.submit(replace(edit, spec=spec))


def test_a_lora_of_the_denoiser_alone_needs_no_text_encoders(tmp_path: Path) -> None:
    networks = loaded("encode", "denoise", "decode").networks
    ink = {UNET: random_layers(networks[UNET], seed=1)}
    both = {**ink, "text_encoder": random_layers(networks["text_encoder"], seed=2, targets=TEXT)}
    source = LorasByHand.of({"ink": ink, "both": both})
    order, wrong = (
        EngineOrder(key=name, spec=replace(SPEC, loras=(lora_spec(name, denoiser_only=True),)), shared_turns=False)
        for name in ("ink", "both")
    )
    made = Parted(tmp_path, loras=source)
    try:
        drawn = made.draw(order)
        error = made.draw(wrong).error  # the store never says that of one with a part for text encoders
    finally:
        made.stop()
    assert "a LoRA of text encoders came to a worker without them" in error.message
    whole = loaded("encode", "denoise", "decode")
    engine = ManualEngine(Engine(whole, LIMITS, addons=(with_loras(whole, source),)))
    wanted, plain = engine.draw(order), engine.draw(replace(order, key="plain", spec=SPEC))
    assert drawn.latents[0].equal(wanted.latents[0])
    assert (drawn.pixels[0] == wanted.pixels[0]).all()
    assert not wanted.latents[0].equal(plain.latents[0])
    assert [use.name for use in drawn.record.provenance.loras] == ["ink"]
    assert not source.open


def test_a_cancelled_job_leaves_no_request_behind(parted: Parted) -> None:
    parted.workers["enc"].gate.acquire()
    parted.engine.submit(EngineOrder(key="c", spec=SPEC))
    (encoders,) = [addon for addon in parted.addons if addon.kind == kinds.ENCODE]
    wait_until(lambda: not parted.workers["enc"].links.tasks.is_empty, "the request has come")
    parted.engine.engine.cancel("c")
    assert not encoders.client._calls  # type: ignore[attr-defined]
    handlers = parted.workers["enc"].links.handlers
    wait_until(lambda: not any(handler._waiting for handler in handlers), "the cancel message has come")
    parted.workers["enc"].gate.release()
    drawn = parted.draw(EngineOrder(key="after", spec=SPEC))
    assert drawn.pixels
    assert parted.workers["enc"].computed == 1


def test_a_decoder_tells_how_it_decoded(tmp_path: Path) -> None:
    made = Parted(tmp_path, vae=VaeSettings(tile_pixels=32))
    try:
        spec = replace(SPEC, width=96, height=96, num_inference_steps=1)
        record = made.draw(EngineOrder(key="tiled", spec=spec)).record
    finally:
        made.stop()
    assert record.provenance.vae_tiled
    assert not record.decoded_as_stock


def test_a_picture_that_a_decoder_refuses_fails_with_its_error(parted: Parted) -> None:
    for name in ("dec-1", "dec-2"):
        parted.workers[name].links._max_pixels = 64
    error = parted.draw(EngineOrder(key="large", spec=SPEC)).error
    assert isinstance(error, TooLarge)
    assert "the worker that decodes draws at most 64" in error.message


def test_images_of_one_job_are_decoded_at_the_same_time(parted: Parted, whole: ManualEngine) -> None:
    order = EngineOrder(key="several", spec=replace(SPEC, num_images=3), shared_turns=False)
    wanted = whole.draw(order)
    client, decoders = decode_client(parted), [parted.workers[name] for name in ("dec-1", "dec-2")]
    with decoders[0].gate, decoders[1].gate:
        drawn = parted.engine.submit(order)

        def are_asked() -> bool:
            parted.engine.turn()
            return sorted(client.pending(link) for link in client._links.values()) == [1, 2]

        wait_until(are_asked, "all images to wait at the decoders")
    parted.engine.run()
    assert all((one == other).all() for one, other in zip(drawn.pixels, wanted.pixels, strict=True))


def test_a_worker_with_text_encoders_edits_and_has_the_image_decoded(tmp_path: Path, whole: ManualEngine) -> None:
    spec = replace(SPEC, strength=0.8, prompt="a green circle")
    order = edit_order(spec, PIL.Image.fromarray(PICTURE.numpy()), box_mask((6, 10, 20, 26), SIZE, SIZE), preview=True)
    made = Parted(tmp_path, roles=("encode", "denoise"))
    try:
        drawn = made.draw(order)
    finally:
        made.stop()
    wanted = whole.draw(order)
    assert (drawn.pixels[0] == wanted.pixels[0]).all()
    assert drawn.record.provenance.mask == wanted.record.provenance.mask
    assert made.computed("dec-1", "dec-2") == 1
