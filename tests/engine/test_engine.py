"""The engine's numbers are those of plain PyTorch, at every budget, chunk size and setting; one rank, no GPU."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.chunks.tables.optimizers import SGD, AdamW, Optimizer
from scrimp.engine import Engine, Memory
from scrimp.errors import FitError, RunError
from tests.support.reference import Batch, train_bf16, train_fp32

ZOO = ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "vgg-tiny", "moe-tiny"]
STEPS = 20
LR = 3e-3


def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


@cache
def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build(name)


@cache
def batches_of(name: str, steps: int = STEPS, batch: int = 4) -> tuple[Batch, ...]:
    return tuple(zoo.example_batch(name, batch=batch, step=step) for step in range(steps))


@cache
def reference(name: str, precision: str, clip: float | None = None, accumulate: int = 1) -> tuple[Any, Any]:
    loop = train_fp32 if precision == "fp32" else train_bf16
    return loop(model_of(name), list(batches_of(name)), adamw, clip=clip, micro_batches=accumulate)


def engine_for(model: nn.Module, device: str | int = "1GiB", optimizer: Optimizer | None = None, **kwargs: Any) -> Engine:
    return Engine(copy.deepcopy(model), optimizer=optimizer or AdamW(lr=LR), memory=Memory(device=device), device="cpu", **kwargs)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert {*want} <= {*got}
    wrong = [name for name in want if not torch.equal(got[name].float(), want[name].float())]
    assert not wrong, f"{len(wrong)} of {len(want)} differ: {wrong[:5]}"


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    """The state, and the buffers that a state dict leaves out."""
    return {**dict(engine._run.model.named_buffers()), **engine.state_dict()}


def run(engine: Engine, batches: tuple[Batch, ...]) -> list[float]:
    return [float(engine.step(*batch)) for batch in batches]


def traced_peak(engine: Engine) -> int:
    """What a tracing step took at its peak, holding as little as it could."""
    plan = engine._run.planning.current
    assert plan is not None
    schedule_steps = max(m.room_nbytes + sum(engine._run.store.nbytes(k) for k in m.needs) for m in plan.trace)
    return schedule_steps + sum(buffer.nbytes for buffer in engine._run.model.buffers())


def least_budget(name: str, precision: str, recompute: str = "recompute,offload") -> int:
    engine = engine_for(model_of(name), precision=precision, activations=recompute)
    engine.step(*batches_of(name)[0])
    return traced_peak(engine)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_bit_equal_to_plain_pytorch_where_all_fits(name: str, precision: str) -> None:
    want, losses = reference(name, precision)
    engine = engine_for(model_of(name), precision=precision, activations="keep")
    assert run(engine, batches_of(name)) == losses
    assert_same(engine.state_dict(), want)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ZOO)
def test_bit_equal_where_one_layer_fits(name: str, precision: str) -> None:
    """The least budget that the first step showed, and tiny chunks."""
    want, _ = reference(name, precision, clip=0.7)
    least = least_budget(name, precision)
    engine = engine_for(
        model_of(name), least, precision=precision, activations="recompute,offload", clip_norm=0.7, chunk_numel=1000
    )
    run(engine, batches_of(name))
    assert_same(engine.state_dict(), want)
    assert engine.ledger.peak_nbytes <= least
    everything = engine_for(model_of(name), precision=precision, activations="recompute,offload", clip_norm=0.7)
    run(everything, batches_of(name))
    assert_same(engine.state_dict(), everything.state_dict())
    assert engine._run.store.traffic.up_nbytes > everything._run.store.traffic.up_nbytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_budgets_between_are_bit_identical_and_kept(precision: str) -> None:
    name = "gpt-tiny"
    want, _ = reference(name, precision)
    least = least_budget(name, precision, "keep")
    traffic = []
    for extra in (0, 20_000, 60_000, 200_000, 10_000_000):
        engine = engine_for(model_of(name), least + extra, precision=precision, activations="keep", chunk_numel=4096)
        run(engine, batches_of(name))
        assert_same(engine.state_dict(), want)
        assert engine.ledger.peak_nbytes <= least + extra
        traffic.append(engine._run.store.traffic.up_nbytes)
    # Between the two the engine takes the fewest predicted seconds, which are not always the fewest bytes.
    assert traffic[0] > traffic[-1] == min(traffic)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation(precision: str, accumulate: int) -> None:
    want, losses = reference("gpt-tiny", precision, 0.5, accumulate)
    engine = engine_for(model_of("gpt-tiny"), precision=precision, clip_norm=0.5, micro_batches=accumulate)
    assert run(engine, batches_of("gpt-tiny")) == pytest.approx(losses, rel=1e-6)
    assert_same(engine.state_dict(), want)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(momentum: float) -> None:
    def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=momentum, weight_decay=0.01, fused=True)

    want, _ = train_fp32(model_of("vgg-tiny"), list(batches_of("vgg-tiny")), make)
    engine = engine_for(
        model_of("vgg-tiny"), optimizer=SGD(lr=0.1, momentum=momentum, weight_decay=0.01), precision="fp32", activations="keep"
    )
    run(engine, batches_of("vgg-tiny"))
    assert_same(engine.state_dict(), want)


def test_a_rate_that_changes_and_groups() -> None:
    model = model_of("gpt-tiny")
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    plain = copy.deepcopy(model)
    named = dict(plain.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if n in biases], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if n not in biases], "weight_decay": 0.2},
        ],
        lr=LR,
        fused=True,
    )
    for step, batch in enumerate(batches_of("gpt-tiny")):
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + step)
        plain(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    spec = AdamW(lr=lambda step: LR / (1 + step), weight_decay=0.2, groups=[("*bias", {"weight_decay": 0.0})])
    engine = engine_for(model, optimizer=spec, precision="fp32", activations="keep")
    run(engine, batches_of("gpt-tiny"))
    assert_same(engine.state_dict(), plain.state_dict())


class Odd(nn.Module):
    """Tied weights, a parameter that is never used, a frozen layer, a module used three times, a direct parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.again = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.blocks[1][0].bias.requires_grad_(False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = x + block(self.again(x))
        x = self.frozen(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())}


def odd_batches() -> list[Batch]:
    draw = torch.Generator().manual_seed(0)
    lengths = [8, 8, 5, 12, 8, 3]  # the sequence length changes: the trace is recorded anew
    return [(torch.randint(0, 50, (4, n), generator=draw), torch.randint(0, 50, (4, n), generator=draw)) for n in lengths]


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tied_unused_frozen_and_repeated(precision: str, recompute: str) -> None:
    torch.manual_seed(1)
    model = Odd()
    loop = train_fp32 if precision == "fp32" else train_bf16
    want, _ = loop(model, odd_batches(), adamw, loss_of=lambda out: out["loss"])
    for device in ("1GiB", "96KiB"):
        engine = engine_for(model, device, precision=precision, activations=recompute, chunk_numel=128)
        for step, batch in enumerate(odd_batches()):
            engine.step(*batch)
            if step == 2:
                with_loss = engine.evaluate(*odd_batches()[0])["loss"]
                assert with_loss.isfinite()
        got = engine.state_dict()
        assert_same(got, want)
        assert torch.equal(got["head.weight"], got["embed.weight"])


def poisoned(engine: Engine, seed: int) -> list[int]:
    """Evict layers that are not running after operators drawn at random, and poison what is freed; what was evicted."""
    draw = random.Random(seed)
    residents, store, meter = engine._run.residents, engine._run.store, engine._run.meter
    drop, counted, evicted = store.drop, meter._count_all, []
    engine._run.planning._on_device = frozenset()  # none on the device: those never leave

    def poisoning(layer: int) -> None:
        if store.resident[layer] and not store.anchored(layer):
            store.flats[layer].fill_(float("nan"))
        drop(layer)

    def after_an_operator(out: Any) -> None:
        counted(out)
        if residents.moving or not residents._current or draw.random() > 0.2:
            return
        residents.moving = True  # what is done to layers now is not the model's doing
        for other in range(len(store.flats)):
            if store.resident[other] and other not in residents._current and other not in residents._arrived:
                store.drop(other)
                evicted.append(other)
        residents.moving = False

    store.drop = poisoning  # type: ignore[method-assign]
    meter._count_all = after_an_operator
    engine._run.metering.step = lambda plan, number: meter  # type: ignore[method-assign]  # all steps' operators are wanted
    return evicted


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "vgg-tiny", "moe-tiny"])
def test_random_evictions_with_poisoned_slots_change_no_bit(name: str, recompute: str) -> None:
    want, _ = reference(name, "bf16")
    engine = engine_for(model_of(name), precision="bf16", activations=recompute)
    evicted = poisoned(engine, seed=1)
    run(engine, batches_of(name))
    assert len(evicted) > 50
    assert_same(engine.state_dict(), want)


def test_a_model_on_meta_is_made_in_the_arenas() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny")
    engine = Engine(model, optimizer=AdamW(lr=LR), memory=Memory(device="1GiB"), device="cpu")
    losses = run(engine, batches_of("gpt-tiny"))
    assert losses[-1] < losses[0]


def test_bytes_per_parameter_on_the_host() -> None:
    model = model_of("gpt-tiny")
    count = sum(p.numel() for p in model.parameters())
    for precision, accumulate, nbytes in [("bf16", 1, 14), ("bf16", 2, 16), ("fp32", 1, 16)]:
        engine = engine_for(model, precision=precision, micro_batches=accumulate)
        padding = engine._run.store.table.padding
        assert engine._run.store.host_nbytes() <= nbytes * (count + padding)


def test_it_does_not_fit() -> None:
    with pytest.raises(FitError, match=r"layer 'embed' has 4.0 KiB of weights, the device budget is 1.0 KiB .*embed.weight"):
        engine_for(model_of("gpt-tiny"), "1KiB")
    engine = engine_for(model_of("gpt-tiny"), "60KiB", activations="keep", precision="fp32")
    before = engine.state_dict()
    with pytest.raises(FitError, match=r"step 0 needs .* the budget is 60.0 KiB .*Use activations='auto' or a smaller batch"):
        engine.step(*batches_of("gpt-tiny")[0])
    assert_same(engine.state_dict(), before)


def test_auto_recomputes_only_if_it_must() -> None:
    """And only the layers that it must: between everything and nothing, some."""
    shape = {"layers": 6, "seq": 64, "dim": 32}
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", **shape)
    batches = [zoo.example_batch("gpt-tiny", batch=4, step=step, **shape) for step in range(6)]
    want, _ = train_bf16(model, batches, adamw)

    def peak(recompute: str) -> int:
        engine = engine_for(model, precision="bf16", activations=recompute)
        engine.step(*batches[0])
        return traced_peak(engine)

    least, most = peak("recompute,offload"), peak("keep")
    again = []
    for share in (0.0, 0.3, 0.6, 1.0):
        budget = int(least + share * (most - least))
        engine = engine_for(model, budget, precision="bf16", activations="auto")
        run(engine, tuple(batches))
        assert_same(engine.state_dict(), want)
        assert engine.ledger.peak_nbytes <= budget
        again.append(len(engine._run.recompute.again))
    assert again == sorted(again, reverse=True)
    assert again[0] > again[1] > again[-1]
    assert again[-1] <= 1


def test_inputs_of_recomputed_layers_are_parked_where_the_device_has_no_room_for_them() -> None:
    shape = {"layers": 6, "seq": 64, "dim": 32}
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", **shape)
    batches = [zoo.example_batch("gpt-tiny", batch=4, step=step, **shape) for step in range(4)]
    want, _ = train_bf16(model, batches, adamw)
    engine = engine_for(model, precision="bf16", activations="recompute,offload")
    engine.step(*batches[0])
    inputs = 4 * 64 * 32 * 2  # of one block
    budget = traced_peak(engine) - 3 * inputs
    engine = engine_for(model, budget, precision="bf16", activations="recompute,offload")
    run(engine, tuple(batches))
    assert engine._run.recompute.offloaded
    assert engine.ledger.host.peak.nbytes >= engine._run.store.host_nbytes() + 5 * inputs
    assert engine.ledger.peak_nbytes <= budget
    assert_same(engine.state_dict(), want)


class Spiky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * factor).sum()


def test_a_gradient_that_is_not_finite_is_skipped_and_named() -> None:
    model = Spiky()
    engine = engine_for(model, optimizer=SGD(lr=0.1))
    engine.step(torch.ones(2, 4), torch.ones(2, 1))
    before = engine.state_dict()
    with pytest.warns(UserWarning, match=r"step 1: gradient of layers\.0\.weight is not finite"):
        engine.step(torch.ones(2, 4), torch.full((2, 1), float("inf")))
    assert engine.optimizer.skipped == 1
    assert_same(engine.state_dict(), before)
    engine.step(torch.ones(2, 4), torch.ones(2, 1))
    assert not torch.equal(engine.state_dict()["layers.0.weight"], before["layers.0.weight"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: engine_for(Spiky(), precision="fp8"), ["'fp8'", "'bf16'"]),
        (lambda: engine_for(Spiky(), micro_batches=0), ["micro_batches=0"]),
        (lambda: engine_for(Spiky(), activations="some"), ["'some'", "'auto'"]),
        (lambda: engine_for(Spiky(), clip_norm=0.0), ["clip_norm=0.0"]),
        (lambda: engine_for(Spiky(), optimizer=AdamW(groups=[("nope*", {})])), ["nope*", "6", "layers.0.weight"]),
        (lambda: engine_for(Spiky(), optimizer=AdamW(groups=[("*", {"momentum": 1})])), ["momentum", "weight_decay"]),
        (lambda: engine_for(nn.Linear(2, 2)).step(torch.ones(3, 2)), ["Tensor", "loss=function"]),
        (lambda: engine_for(Spiky(), micro_batches=2).step(torch.ones(3, 4), torch.ones(3, 1)), ["(3, 4)", "micro_batches=2"]),
    ],
)
def test_what_is_refused_and_why(make: Any, words: list[str]) -> None:
    with pytest.raises(RunError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), str(caught.value)


class Stray(nn.Module):
    """Weights that are used without their module being called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)), nn.Parameter(torch.full((16,), 0.5))])
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scales[0] * x
        for block in self.blocks:
            x = x + block(x) * self.scales[1]
        return nn.functional.linear(x, self.head.weight, bias=self.head.bias).square().mean()


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
def test_weights_that_are_used_where_their_module_does_not_run(recompute: str) -> None:
    torch.manual_seed(0)
    model = Stray()
    batches = [(torch.randn(4, 16),) for _ in range(6)]
    want, _ = train_fp32(model, batches, adamw)
    for device in ("1GiB", "24KiB"):
        engine = engine_for(model, device, precision="fp32", activations=recompute)
        run(engine, tuple(batches))
        assert_same(engine.state_dict(), want)
        assert engine.evaluate(*batches[0]).isfinite()
