"""Sets of LoRAs in and beside weights: sums by the definition, swaps that leave no trace, and which way is chosen."""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bottega.addons.loras.engine import (
    Factors,
    Layers,
    LoraAtScale,
    LoraLayer,
    LoraSet,
    LoraWeights,
    Patcher,
    SetKey,
    SwapCosts,
    UnmergedLoras,
    make_set,
)
from bottega.device.memory_plan import MemoryPlan
from bottega.errors import LoraUnusable
from bottega.model.model import Model
from bottega.model_files.family_names import UNET
from tests.samples.engine_loras import random_layers
from tests.samples.lora_files import low_rank
from tests.support.torch_threads import torch_threads
from tests.support.waiting import EVENTUALLY_S

ALL = ("0", "2", "3", "4.conv", "4.linear")
SWAPS = 1000


class Net(nn.Module):
    """Linear layers, and convolutions with strides and paddings."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(8, 6, 3, stride=2, padding=1),
            nn.Conv2d(6, 5, 1),
            Tail(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 7, (1, 3))
        self.linear = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.conv(x).flatten(2).transpose(1, 2))
        return out


@pytest.fixture
def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().eval()


def use(net: nn.Module, seed: int, *, targets: Sequence[str] = ALL, scale: float = 0.7, rank: int = 4) -> LoraAtScale:
    return LoraAtScale(
        digest=str(seed), scale=scale, layers={UNET: random_layers(net, seed, rank=rank, targets=targets)}
    )


def set_of(net: nn.Module, *uses: LoraAtScale) -> LoraSet:
    return make_set(uses, {UNET: net}, [UNET])


def separate_set(net: nn.Module, *uses: LoraAtScale) -> LoraSet:
    """A set whose LoRAs are computed one by one, as PEFT does."""
    return make_set(uses, {UNET: net}, [UNET], as_peft=True)


def merged(net: nn.Module, uses: Sequence[LoraAtScale]) -> Net:
    """A copy of the network with the LoRAs in it, by the definition, in double precision."""
    copy = Net().double().eval()
    copy.load_state_dict(net.state_dict())
    for each in uses:
        for path, layer in low_rank(each.layers[UNET]).items():
            weight = copy.get_submodule(path).weight
            assert isinstance(weight, Tensor)
            product = layer.up.double().flatten(1) @ layer.down.double().flatten(1)
            weight.data += each.scale * layer.scale * product.view_as(weight)
    return copy


@torch.inference_mode()
def test_rows_of_unlike_sets_get_what_networks_with_these_loras_in_them_give(net: Net) -> None:
    """Two rows, one row, several LoRAs, ranks that differ, layers that others do not touch, and none."""
    a, b, c = use(net, 1), use(net, 2, rank=7, scale=-1.5), use(net, 3, rank=2, targets=["0", "4.linear"])
    sets: list[list[LoraAtScale]] = [[a], [a], [b], [b], [a, b, c], [a, b, c], [c], [], [b, a], []]
    made = {len(uses) and str([each.digest for each in uses]): set_of(net, *uses) for uses in sets}
    rows = [made[str([each.digest for each in uses])] if uses else None for uses in sets]
    x = torch.randn(len(sets), 3, 8, 8)
    expected = torch.cat([merged(net, uses)(x[row : row + 1].double()) for row, uses in enumerate(sets)])
    plain = net(x)
    for row_by_row in (False, True):
        side_path = UnmergedLoras(net, UNET, row_by_row=row_by_row)
        side_path.enter(rows)
        assert (net(x) - expected).abs().max() < 1e-5
        side_path.leave()
        assert torch.equal(net(x), plain)
    assert (expected - plain).abs().max() > 0.02


@torch.inference_mode()
def test_of_what_groups_have_stacked_as_much_is_kept_as_there_is_room_for(net: Net) -> None:
    a, b, c = (set_of(net, use(net, number)) for number in (1, 2, 3))
    x = torch.randn(2, 3, 8, 8)
    wide, narrow = UnmergedLoras(net, UNET), UnmergedLoras(net, UNET, stacked_bytes=1)
    for sets in ([a, b], [b, c], [c, a], [a, b], [a, None]):
        outs = []
        for side_path in (wide, narrow):
            side_path.enter(sets)
            outs.append(net(x))
            side_path.leave()
        assert torch.equal(*outs)
        assert len(narrow._plans) == 1, "the one that was in use, which the next turn of the group needs"
    assert len(wide._plans) == 4


@torch.inference_mode()
def test_loras_that_no_request_uses_are_freed_though_their_group_may_come_back(net: Net) -> None:
    side_path = UnmergedLoras(net, UNET, stacked_bytes=1)
    gone = separate_set(net, use(net, 1))
    down = weakref.ref(next(iter(gone.of(UNET).values())).down)
    side_path.enter([gone])
    side_path.leave()
    del gone
    side_path.enter([separate_set(net, use(net, 2))])
    assert down() is None


class Tokens(nn.Module):
    """The beginning of a transformer, whose first linear layer gets feature maps as tokens.

    In half precision, the product that torch chooses for such input differs by whether weights require gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj_in = nn.Linear(1280, 1280)
        self.proj_out = nn.Linear(1280, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj_out(self.proj_in(as_tokens(x)))
        return out


def as_tokens(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(1, 2)


@pytest.fixture
def tokens() -> Tokens:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tokens().half()


@torch.inference_mode()
@pytest.mark.parametrize("touched", ["proj_in", "proj_out"])
def test_row_by_row_no_bit_of_half_precision_depends_on_the_neighbours(tokens: Tokens, touched: str) -> None:
    a, b = (separate_set(tokens, use(tokens, seed, targets=(touched,))) for seed in (1, 2))
    x = torch.randn(4, 1280, 8, 8, generator=torch.Generator().manual_seed(3)).half()
    side_path = UnmergedLoras(tokens, UNET, row_by_row=True)
    plain = tokens(x)
    outs = []
    for sets in ([None, a, a, b], [None, None, a, a], [None, b, a, None]):
        side_path.enter(sets)
        outs.append(tokens(x))
        side_path.leave()
    assert all(torch.equal(out[0], plain[0]) for out in outs)
    assert all(torch.equal(out[2], outs[0][2]) for out in outs)


@torch.inference_mode()
@pytest.mark.parametrize("touched", ["proj_in", "proj_out"])
def test_half_precision_rounds_as_with_peft_whose_base_weights_require_no_gradients(
    tokens: Tokens, touched: str
) -> None:
    lora = separate_set(tokens, use(tokens, 1, targets=(touched,)))
    x = torch.randn(2, 1280, 8, 8, generator=torch.Generator().manual_seed(3)).half()
    side_path = UnmergedLoras(tokens, UNET)
    side_path.enter([lora, lora])
    ours = tokens(x)
    side_path.leave()
    tokens.requires_grad_(False)
    factors = lora.of(UNET)[touched]

    def changed(layer: nn.Linear, tensor: Tensor) -> Tensor:
        low = nn.functional.linear(tensor.flatten(0, 1), factors.down)
        added = nn.functional.linear(low, factors.up) * factors.terms[0].scale
        out: Tensor = layer(tensor)
        return out + added.view_as(out)

    inside = changed(tokens.proj_in, as_tokens(x)) if touched == "proj_in" else tokens.proj_in(as_tokens(x))
    assert torch.equal(ours, tokens.proj_out(inside) if touched == "proj_in" else changed(tokens.proj_out, inside))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_after_a_thousand_random_swaps_every_weight_is_equal_bit_for_bit_and_where_it_was(
    net: Net, dtype: torch.dtype
) -> None:
    net.to(dtype)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    addresses = {name: parameter.data_ptr() for name, parameter in net.named_parameters()}
    chance = random.Random(0)
    uses = [
        use(net, seed, targets=chance.sample(ALL, chance.randint(1, len(ALL))), rank=chance.randint(1, 9))
        for seed in range(12)
    ]
    patcher = Patcher(net, UNET)
    for _ in range(SWAPS):
        chosen = chance.sample(uses, chance.randint(0, 3))
        if chosen:
            patcher.patch(set_of(net, *(replace(each, scale=chance.uniform(-2, 2)) for each in chosen)))
        elif chance.random() < 0.5:
            patcher.put_back()
        else:
            patcher.restore()
            assert patcher.pristine_bytes == 0
    patcher.patch(set_of(net, *uses[:2]))
    expected = merged_from(before, uses[:2], dtype)
    for name, tensor in net.state_dict().items():
        assert (tensor.double() - expected[name]).abs().max() <= 2 * torch.finfo(dtype).eps * expected[name].abs().max()
    patcher.restore()
    assert patcher.patched is None
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
    assert {name: parameter.data_ptr() for name, parameter in net.named_parameters()} == addresses


def merged_from(before: Mapping[str, Tensor], uses: Sequence[LoraAtScale], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights with the LoRAs in them, in double precision, from factors in the element type of the weights."""
    whole = Net().to(dtype)
    whole.load_state_dict(dict(before))
    rounded = [replace(each, layers={UNET: _rounded(each, dtype)}) for each in uses]
    return dict(merged(whole, rounded).state_dict())


def _rounded(each: LoraAtScale, dtype: torch.dtype) -> Layers:
    factor = {path: each.scale * layer.scale for path, layer in each.layers[UNET].items()}
    return {
        path: LoraLayer(
            down=layer.down.to(dtype), up=(layer.up * factor[path]).to(dtype).double() / factor[path], scale=layer.scale
        )
        for path, layer in low_rank(each.layers[UNET]).items()
    }


def test_pristine_copies_are_of_the_touched_weights_alone_and_where_they_are_wanted(net: Net) -> None:
    patcher = Patcher(net, UNET, keep_on=torch.device("cpu"))
    touched = set_of(net, use(net, 1, targets=["0", "4.linear"]))
    patcher.patch(touched)
    assert patcher.pristine_bytes == patcher.touched_bytes(touched) == 4 * (8 * 3 * 9 + 7 * 4)
    patcher.patch(set_of(net, use(net, 2, targets=["3"])))
    assert patcher.pristine_bytes == 4 * 6 * 5
    patcher.put_back()
    assert patcher.pristine_bytes == 4 * 6 * 5, "the next set finds them made"
    patcher.patch(set_of(net, use(net, 3, targets=["0"])))
    assert patcher.pristine_bytes == 4 * 8 * 3 * 9


@pytest.mark.parametrize(("width", "shares"), [(8, 1), (1100, 2)])
def test_layers_are_shared_out_among_threads_that_compute_alone_where_that_pays(width: int, shares: int) -> None:
    seen: set[tuple[int, int]] = set()
    together = threading.Barrier(shares)

    class Seeing(Tensor):
        """A factor that notes who multiplies with it, and by how many threads, once all of them do."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.addmm:
                together.wait(EVENTUALLY_S)  # else one that is quick, or has a busy machine for itself, takes all
                seen.add((threading.get_ident(), torch.get_num_threads()))
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    layers = {name: nn.Linear(width, width) for name in "01"}
    patcher = Patcher(nn.ModuleDict(layers), UNET)
    factors = {name: Factors(down=torch.randn(2, width), up=torch.randn(width, 2)) for name in layers}
    seeing = {name: replace(each, up=each.up.as_subclass(Seeing)) for name, each in factors.items()}
    before = {name: layer.weight.clone() for name, layer in layers.items()}
    with torch_threads(2):
        patcher.patch(LoraSet(key=(), components={UNET: seeing}))
        assert torch.get_num_threads() == 2
        for name, each in factors.items():
            torch.testing.assert_close(layers[name].weight, before[name] + each.up @ each.down, rtol=0, atol=1e-4)
        patcher.put_back()
    assert all(torch.equal(layer.weight, before[name]) for name, layer in layers.items())
    assert len({thread for thread, _ in seen}) == shares
    assert {threads for _, threads in seen} == {1}


def test_a_layer_that_fails_in_another_thread_fails_the_patch_and_all_can_be_restored() -> None:
    net = nn.Sequential(nn.Linear(1100, 1100), nn.Linear(1100, 1100))
    before = [parameter.clone() for parameter in net.parameters()]
    good = Factors(down=torch.randn(2, 1100), up=torch.randn(1100, 2))
    patcher = Patcher(net, UNET)
    with torch_threads(2):
        for bad in "01":
            factors = {name: replace(good, down=torch.randn(3, 1100)) if name == bad else good for name in "01"}
            with pytest.raises(RuntimeError):
                patcher.patch(LoraSet(key=(), components={UNET: factors}))
            assert torch.get_num_threads() == 2
            patcher.restore()
            assert all(torch.equal(*pair) for pair in zip(net.parameters(), before, strict=True))


def test_the_order_of_loras_changes_no_bit_and_another_scale_is_another_set(net: Net) -> None:
    a, b = use(net, 1), use(net, 2)
    one, other = set_of(net, a, b), set_of(net, b, a)
    assert one.key == other.key
    for path, factors in one.of(UNET).items():
        assert torch.equal(factors.down, other.of(UNET)[path].down)
    assert set_of(net, replace(a, scale=0.1), b).key != one.key


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("layers.9", {}),
        ("layers.1", {}),
        ("layers.0", {"down": torch.zeros(4, 3, 1, 1)}),
        ("layers.0", {"up": torch.zeros(8, 5, 1, 1)}),
        ("layers.4.linear", {"down": torch.zeros(4, 9)}),
    ],
)
def test_a_layer_without_a_module_that_it_fits_is_refused_by_name(net: Net, path: str, change: dict[str, Any]) -> None:
    layers = dict(random_layers(net, 1, targets=ALL))
    layers[path] = replace(layers.get(path, layers["layers.0"]), **change)
    with pytest.raises(LoraUnusable, match=path):
        set_of(net, LoraAtScale(digest="1", scale=1.0, layers={UNET: layers}))


def test_a_patch_pays_when_enough_steps_are_left_for_what_was_measured() -> None:
    costs, key = SwapCosts(), (("a", 1.0),)
    for _ in range(50):
        costs.observe_step(key, 1.1, 1.0)
        costs.observe_patch(1000, 2.0)
    assert costs.share(key) == pytest.approx(0.1, abs=0.02)
    assert costs.swap_s(1000) == pytest.approx(3.0)
    costs.observe_patch(500, 1.0)
    assert costs.last_swap_s == pytest.approx(1.5)
    needed = next(steps for steps in itertools.count() if pays(costs, key, steps))
    assert 25 <= needed <= 36
    assert not pays(costs, key, needed - 1)
    for _ in range(50):
        costs.observe_step(key, 1.4, 1.0)
    assert pays(costs, key, needed // 2)


def test_what_is_remembered_of_costs_is_bounded() -> None:
    costs = SwapCosts()
    for each in range(1000):
        costs.observe_step(((str(each), 1.0),), 1.2, 1.0)
    assert len(costs._shares) <= 64


def pays(costs: SwapCosts, key: SetKey, steps: int) -> bool:
    return costs.pays(key, steps=steps, step_s=1.0, touched_bytes=1000)


class Cheap(SwapCosts):
    """Any step is worth a patch."""

    def pays(self, key: SetKey, *, steps: int, step_s: float, touched_bytes: int) -> bool:
        return steps > 0


def patched(weights: LoraWeights) -> LoraSet | None:
    return weights.patched


def test_weights_are_patched_while_all_rows_share_a_set_and_put_back_before_anybody_else_runs(model: Model) -> None:
    weights = LoraWeights(model)
    weights.costs = Cheap()
    unet = model.backbone.network
    before = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    mine = [LoraAtScale(digest="a", scale=1.0, layers={UNET: random_layers(unet, 1)})]
    a, same = weights.denoiser_set(mine), weights.denoiser_set(mine)
    b = weights.denoiser_set([LoraAtScale(digest="b", scale=1.0, layers={UNET: random_layers(unet, 2)})])
    assert a is same
    weights.choose([a, b], steps=9, step_s=1.0)
    assert patched(weights) is None
    weights.choose([a, same], steps=9, step_s=1.0)
    assert patched(weights) is a
    assert weights.pristine_bytes > 0
    weights.choose([], steps=0, step_s=1.0)
    assert patched(weights) is a  # the next one may want the same
    weights.choose([b], steps=0, step_s=1.0)
    assert patched(weights) is None
    weights.choose([a], steps=9, step_s=1.0)
    weights.enter([a, None])
    assert patched(weights) is None
    weights.leave()
    for name, tensor in unet.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("on_host", [False, True])
def test_copies_that_the_plan_has_no_room_for_are_not_made_on_the_device(model: Model, on_host: bool) -> None:
    plan = MemoryPlan(1000)
    weights = LoraWeights(replace(model, memory=plan), pristine_on_host=on_host)
    weights.costs = Cheap()
    a = weights.denoiser_set(
        [LoraAtScale(digest="a", scale=1.0, layers={UNET: random_layers(model.backbone.network, 1)})]
    )
    weights.choose([a], steps=9, step_s=1.0)
    assert weights.patched is (a if on_host else None)
    assert (weights.pristine_bytes > 0) is on_host
    assert plan.reserved == {}
    weights.restore()


def test_what_copies_take_is_reserved_until_they_go(model: Model) -> None:
    plan = MemoryPlan(1 << 30)
    weights = LoraWeights(replace(model, memory=plan))
    weights.costs = Cheap()
    a = weights.denoiser_set(
        [LoraAtScale(digest="a", scale=1.0, layers={UNET: random_layers(model.backbone.network, 1)})]
    )
    weights.choose([a], steps=9, step_s=1.0)
    assert plan.reserved == {"pristine copies": weights.pristine_bytes}
    weights.restore()
    assert plan.reserved == {}


def test_without_memory_for_the_copies_loras_go_beside_the_weights(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = LoraWeights(model)
    weights.costs = Cheap()
    unet = model.backbone.network
    before = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    a = weights.denoiser_set([LoraAtScale(digest="a", scale=1.0, layers={UNET: random_layers(unet, 1)})])
    weights.measure_swap()
    assert weights.swap_s > 0
    left = iter(range(5))
    patch_one = torch.addmm

    def addmm(*args: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise torch.OutOfMemoryError("none left")
        return patch_one(*args, **options)

    monkeypatch.setattr(torch, "addmm", addmm)
    for _ in range(2):
        weights.choose([a], steps=9, step_s=1.0)
    monkeypatch.undo()
    assert weights.patched is None
    assert weights.pristine_bytes == 0
    assert len(caplog.records) == 1
    assert weights.swap_s == 0.0, "no set goes into the weights any more"
    for name, tensor in unet.state_dict().items():
        assert torch.equal(tensor, before[name])
