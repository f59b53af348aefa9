"""The engine's sparse exchange: with everything sent it is DDP, with little sent it does what the formulas say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from scrimp import SGD, AdamW, Dense, Engine, Memory, Mesh, RunError, Sparse, zoo
from scrimp.chunks.schedule.step_cost import Rates
from scrimp.exchange._residual import residual_nbytes
from scrimp.exchange._sparse_or_dense import Pace, sparse_pays
from scrimp.ext.ranks import RankFailure, RankPool, pool
from tests.rank_jobs import ddp as ddp_jobs
from tests.rank_jobs import sparse as jobs
from tests.support import sparse_formulas

EVERYTHING = {"density": 1.0, "values": "fp32", "masking": False, "small": 300}
HOMES = ("host", "device")
FIXED = Rates(up=1e9, down=1e9, host=1e9, device=1e10)  # or choices would be this machine's


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    for key, value in want.items():
        error = float((got[key] - value).abs().max() / value.abs().max().clamp(min=1e-6))
        assert error <= tolerance, f"{key}: {error}"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("placement", HOMES)
def test_with_everything_sent_it_is_ddp(world: int, placement: str) -> None:
    """Through the ordinary packets, every bit with two ranks; with more they are summed in another order."""
    want = pool(world).run(ddp_jobs.dense, "gpt-tiny", 6, jobs.MOMENTUM, timeout_seconds=300)[0]
    for recompute in ("keep", "recompute,offload"):
        others = {"placement": placement, "activations": recompute}
        for state, _ in pool(world).run(jobs.train, "gpt-tiny", 6, EVERYTHING, timeout_seconds=300, **others):
            if world == 2:
                assert all(torch.equal(state[key], value) for key, value in want.items())
            close(state, want, 1e-6)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "resnet-tiny"])
@pytest.mark.parametrize("placement", HOMES)
def test_with_everything_sent_by_one_rank_it_is_the_dense_engine(name: str, placement: str) -> None:
    """Tied weights, batch norm, micro-batches, clipping, both precisions."""
    for others in (
        {"precision": "fp32"}, {"precision": "bf16", "micro_batches": 2},
        {"precision": "fp32", "micro_batches": 2, "clip_norm": 0.5},
        {"precision": "bf16", "optimizer": AdamW(lr=1e-2), "activations": "recompute,offload", "skip_nonfinite": False},
    ):  # fmt: skip
        states = []
        for exchange in (Sparse(**EVERYTHING), Dense()):
            torch.manual_seed(0)
            settings: dict[str, Any] = {"optimizer": SGD(lr=0.05, momentum=0.9), **others}
            engine = Engine(zoo.build(name), memory=Memory(device="1GiB"), device="cpu", exchange=exchange, **settings)
            if placement == "host":
                engine._run.planning._on_device = frozenset()
            for step in range(6):
                engine.step(*zoo.example_batch(name, batch=8, step=step))
            states.append(dict(engine.iter_state()))
        tolerance = 1e-6 if others["precision"] == "fp32" else 2e-2  # bf16 sums of micro-batches round elsewhere
        close(states[0], states[1], tolerance)


@pytest.mark.parametrize(
    ("adam", "raw", "clip"), [(False, False, None), (False, False, 0.5), (True, False, None), (False, True, None)]
)
@pytest.mark.parametrize("placement", HOMES)
def test_it_does_what_the_formulas_say(adam: bool, raw: bool, clip: float | None, placement: str) -> None:
    """Every step against fp64, from what the engine had before it. Without looking, it ends with the same bits."""
    others = {"placement": placement, "optimizer": jobs.ADAM if adam else SGD(lr=jobs.LR, momentum=jobs.MOMENTUM)}
    how = {"adam": adam, "raw": raw, "clip": clip}
    followed = pool(2).run(sparse_formulas.follow, "gpt-tiny", 8, 0.05, 300, timeout_seconds=300, **how, **others)
    assert [wrong for _, wrong in followed] == [[], []]
    settings = {"density": 0.05, "small": 300, "of": "gradient" if raw else "update"}
    for state, _ in pool(2).run(jobs.train, "gpt-tiny", 8, settings, timeout_seconds=300, clip_norm=clip, **others):
        assert all(torch.equal(state[key], value) for key, value in followed[0][0].items())


@pytest.mark.parametrize("placement", HOMES)
def test_on_a_fast_network_layers_travel_whole(placement: str) -> None:
    """Summed, and every bit DDP's with two ranks; what a slow one would have made of it is something else."""
    want = pool(2).run(ddp_jobs.dense, "gpt-tiny", 6, jobs.MOMENTUM, timeout_seconds=300)[0]
    settings = {"density": 0.05, "values": "fp32", "small": 300, "choose": True}
    for network, whole in ((1e12, True), (1e6, False)):
        pace = Pace(network=network, selecting=1e8)
        others = {"placement": placement, "pace": pace, "skip_nonfinite": not whole}
        for state, _ in pool(2).run(jobs.train, "gpt-tiny", 6, settings, timeout_seconds=300, **others):
            assert all(torch.equal(state[key], value) for key, value in want.items()) == whole


NODES = {"mesh": Mesh({"node": 2, "gpu": 2})}


@pytest.mark.parametrize("placement", HOMES)
def test_nodes_with_everything_sent_are_ddp(placement: str) -> None:
    """Dense inside a node, where homes are shared, and packets between nodes."""
    want = pool(4).run(ddp_jobs.dense, "gpt-tiny", 6, jobs.MOMENTUM, timeout_seconds=300)[0]
    for state, _ in pool(4).run(jobs.train, "gpt-tiny", 6, EVERYTHING, timeout_seconds=300, placement=placement, **NODES):
        close(state, want, 1e-6)


def test_nodes_learn_alike_and_skip_alike() -> None:
    """Each rank exchanges its part of every layer with its likes; all ranks end with the same weights."""
    settings = {"density": 0.05, "small": 100, "check_every": 10}
    answers = pool(4).run(jobs.train, "gpt-tiny", 24, settings, timeout_seconds=300, clip_norm=1.0, **NODES)
    for state, losses in answers:
        assert all(torch.equal(state[key], value) for key, value in answers[0][0].items())
        assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    for said, kept, sound, on, skipped in pool(4).run(jobs.not_finite, "gpt-tiny", "device", 1, timeout_seconds=300, **NODES):
        assert "is not finite on node 0; the update is skipped" in said[0]
        assert (kept, sound, on, skipped) == (True, True, True, 1)


def test_nodes_go_on_where_they_were(tmp_path: Path) -> None:
    settings, folder = {"density": 0.05, "small": 100}, jobs.folder_of(tmp_path)
    want = pool(4).run(jobs.train, "gpt-tiny", 8, settings, timeout_seconds=300, **NODES)
    got = pool(4).run(jobs.resumed, "gpt-tiny", 8, 4, settings, folder, timeout_seconds=300, **NODES)
    assert [answer[1] for answer in got] == [answer[1] for answer in want]
    for _, said in pool(2).run(jobs.waiting, "gpt-tiny", 4, settings, folder, load=True, timeout_seconds=300):
        assert "its residuals are dropped" in said[0]


def test_a_mesh_that_is_not_there() -> None:
    with pytest.raises(RunError, match="4 ranks, and 1 are here"):
        jobs.engine_of("gpt-tiny", {}, mesh=Mesh({"node": 2, "gpu": 2}))
    with pytest.raises(RunError, match="one axis, or of two"):
        jobs.engine_of("gpt-tiny", {}, mesh=Mesh({"a": 1, "b": 1, "c": 1}))


def test_what_pays() -> None:
    slow, fast = Pace(network=25e6, selecting=1e8), Pace(network=1e10, selecting=1e8)
    assert sparse_pays(10**6, 4, 0.01, 2, slow)
    assert not sparse_pays(10**6, 4, 0.01, 2, fast)
    assert not sparse_pays(10**6, 200, 0.01, 2, slow)  # 200 ranks send 1 % each: twice of everything
    assert sparse_pays(10**6, 1, 0.01, 2, fast)  # nobody to send to: what is asked for is done


def test_a_network_is_measured_alike_by_all() -> None:
    paces = pool(2).run(jobs.pace, timeout_seconds=60)
    assert paces[0] == paces[1]
    assert 1e5 < paces[0].network < 1e12
    assert 1e5 < paces[0].selecting < 1e12


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_replicas_are_equal_to_the_bit_and_learn(kind: str) -> None:
    """Steps enough to learn with all kinds of residual and place, compared on the way too."""
    settings = {"density": 0.02, "small": 300, "warm_up": 20, "residual": kind, "check_every": 50}
    others = {"precision": "bf16", "skip_nonfinite": kind != "fp32"}  # with fp32 beside the next step, the others judged first
    settings["place"] = "host" if kind == "bf16" else "device"
    optimizer = AdamW(lr=4e-3) if kind == "int8" else SGD(lr=0.1, momentum=0.9)
    steps = 110 if kind == "fp32" else 60
    answers = pool(2).run(jobs.train, "gpt-tiny", steps, settings, optimizer=optimizer, timeout_seconds=300, **others)
    for key, value in answers[0][0].items():
        assert torch.equal(answers[1][0][key], value), key
    losses = answers[0][1]
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def test_a_module_used_three_times_and_one_used_never() -> None:
    states = []
    for exchange in (Sparse(**EVERYTHING), Dense()):
        torch.manual_seed(0)
        model = jobs.Thrice()
        engine = Engine(
            model, optimizer=SGD(lr=0.05, momentum=0.9, weight_decay=0.1), memory=Memory(device="1GiB"), device="cpu",
            precision="fp32", exchange=exchange,
        )  # fmt: skip
        for step in range(6):
            torch.manual_seed(step)
            engine.step(torch.randn(4, 32), torch.randint(8, (4,)))
        states.append(dict(engine.iter_state()))
    assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.05, momentum=0.9), AdamW(lr=0.01, weight_decay=0.3)])
def test_a_layer_that_is_used_now_and_then_misses_nothing(accumulate: int, optimizer: SGD | AdamW) -> None:
    """What came for it waits until it is asked for, or the next comes; and a micro-batch without it does not hold it up."""
    states = []
    for exchange in (Sparse(**EVERYTHING), Dense()):
        torch.manual_seed(0)
        engine = Engine(
            jobs.Sometimes(), optimizer=optimizer, memory=Memory(device="1GiB"), device="cpu", precision="fp32",
            exchange=exchange, skip_nonfinite=False, micro_batches=accumulate,
        )  # fmt: skip
        for step, uses in enumerate([(1, 1), (1, 1), (1, 1), (1, 0), (0, 0), (0, 1), (1, 1), (0, 0), (0, 0), (1, 0), (1, 1)]):
            torch.manual_seed(step)
            use = torch.tensor([part for part in uses for _ in range(2)]) if accumulate == 2 else torch.tensor([uses[0]] * 4)
            engine.step(torch.randn(4, 32), torch.randint(8, (4,)), use)
        states.append(dict(engine.iter_state()))
    close(states[0], states[1], 1e-6)


def test_micro_batches_of_one_step_are_one_gradient() -> None:
    """Into the momentum as they come: no buffer holds their sum, and the numbers are those of the whole batch."""
    states, peaks = [], []
    for accumulate in (1, 2, 4):
        engine = jobs.engine_of("gpt-tiny", {"density": 0.05, "small": 300}, micro_batches=accumulate)
        jobs.steps_of(engine, "gpt-tiny", range(6))
        states.append(dict(engine.iter_state()))
        peaks.append(engine.ledger.device.now["gradients"])
    for state in states[1:]:
        for key, value in states[0].items():
            off = (state[key] - value).abs() > 1e-4 * value.abs().max()
            assert float(off.float().mean()) < 0.05, key
    assert peaks == [0, 0, 0]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_ledger_knows_where_residuals_are(kind: str, place: str) -> None:
    engine = jobs.engine_of("gpt-tiny", {"density": 0.05, "small": 300, "residual": kind, "place": place})
    nbytes = sum(residual_nbytes(kind, slot.numel) for _, slot in engine._run.exchanging.with_residual())  # type: ignore[union-attr]
    assert engine.ledger.host.now["residual"] == nbytes  # homes are on the host at first
    jobs.steps_of(engine, "gpt-tiny", range(6))
    assert {placement.tier for placement in engine._run.store.placements if placement.weights.numel()} == {"device"}
    assert engine.ledger.device.now["residual"] == (nbytes if place == "device" else 0)
    assert engine.ledger.host.now["residual"] == (nbytes if place == "host" else 0)
    engine.close()
    assert engine.ledger.device.now["residual"] == 0


class Slope(torch.nn.Module):
    """Its gradients are the same wherever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(96, 80, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * torch.linspace(-1, 1, 80)).mean()


def test_the_residual_is_in_units_of_weights() -> None:
    """What waits is the difference from the weights that the rank would have had by itself: one copy in fp32, and no gradient."""
    settings = Sparse(density=0.02, values="fp32", residual="weight", masking=False)
    optimizer = SGD(lr=0.5, momentum=0.9)
    engine = Engine(Slope(), optimizer=optimizer, precision="fp32", exchange=settings, device="cpu")
    alone = Slope()
    theirs = torch.optim.SGD(alone.parameters(), 0.5, 0.9)
    for seed in range(12):
        batch = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed))
        engine.step(batch)
        alone(batch).backward()
        theirs.step()
        theirs.zero_grad()
    engine._run.wait()
    weight = engine.state_dict()["layer.weight"]
    waiting = engine._run.exchanging.residuals.of("layer.weight").read(slice(0, weight.numel()))  # type: ignore[union-attr]
    assert (weight - alone.layer.weight).abs().max() > 1e-3  # much of it still waits
    torch.testing.assert_close(weight - waiting.view_as(weight), alone.layer.weight.detach(), rtol=0, atol=1e-6)
    assert engine.ledger.device.now["gradients"] == 0
    assert engine.ledger.device.now["residual"] == weight.nbytes


def test_one_budget_decides_how_residuals_are_kept_too() -> None:
    """Room for all: fp32 on the device. Less: what lets homes stay. Less still: homes go, and residuals with them."""
    found, exchange = {}, Sparse(density=0.05, small=300, residual="auto", place="auto")
    for budget in (4 << 20, 2_100_000, 1_900_000, 1_700_000, 1_500_000, 1_100_000):
        torch.manual_seed(0)
        engine = Engine(
            zoo.build("gpt-tiny", dim=64, tie=False), optimizer=SGD(lr=0.05, momentum=0.9), memory=Memory(device=budget),
            device="cpu", precision="fp32", activations="recompute,offload", exchange=exchange,
        )  # fmt: skip
        with patch.object(type(engine._run.planning), "best_rates", lambda _: FIXED):
            for step in range(8):
                engine.step(*zoo.example_batch("gpt-tiny", batch=2, step=step))
        assert engine.ledger.peak_nbytes <= budget
        way = engine._run.exchanging.residuals.way  # type: ignore[union-attr]
        found[budget] = (way.kind, way.place, sum(placement.tier == "device" for placement in engine._run.store.placements))
    everything = [(kind, place) for kind, place, placements in found.values() if placements == 6]
    assert everything == [("fp32", "device"), ("bf16", "device"), ("int8", "device")]
    assert [placements for _, _, placements in found.values()] == sorted(
        (placements for _, _, placements in found.values()), reverse=True
    )


@pytest.mark.parametrize(("placement", "accumulate"), [("host", 1), ("device", 1), ("device", 2)])
def test_a_nan_on_one_rank_is_skipped_by_all_and_poisons_nothing(placement: str, accumulate: int) -> None:
    for said, kept, sound, on, skipped in pool(2).run(jobs.not_finite, "gpt-tiny", placement, accumulate, timeout_seconds=300):
        assert len(said) == 1
        assert "is not finite on rank 1; the update is skipped" in said[0]
        assert "step 3: gradient of " in said[0]
        assert (kept, sound, on, skipped) == (True, True, True, 1)


def test_a_corrupt_packet_names_its_rank_and_parameters() -> None:
    for answer in pool(2).run(jobs.fault, "gpt-tiny", "corrupt", timeout_seconds=60):
        assert re.search("step 2, gradients of .*: the packet of rank 1 .*checksum", answer), answer


def test_replicas_that_differ_stop_the_run() -> None:
    for answer in pool(2).run(jobs.fault, "gpt-tiny", "differs", timeout_seconds=60):
        assert "step 2: the ranks' weights of layer 'blocks.0' are no longer the same" in answer


@pytest.mark.parametrize("kind", ["dead", "hung"])
def test_a_rank_that_dies_or_hangs_ends_the_others_in_time(kind: str, tmp_path: Path) -> None:
    """Step and parameters are named, and the last checkpoint is whole."""
    folder = jobs.folder_of(tmp_path)
    with RankPool(2, timeout_seconds=60, collective_timeout_seconds=3) as ranks:
        if kind == "dead":
            with pytest.raises(RankFailure, match="exit code 9") as caught:
                ranks.run(jobs.fault, "gpt-tiny", kind, folder, grace_seconds=15)
            assert not caught.value.standing
        else:
            answer = ranks.run(jobs.fault, "gpt-tiny", kind, folder)[0]
            assert re.search("step 2, gradients of .*: mesh rank 0 of 2 failed .* died, hung", answer), answer
    engine = jobs.engine_of("gpt-tiny", {"density": 0.05, "small": 300})
    with pytest.warns(UserWarning, match="saved by 2 ranks and loaded by 1"):
        engine.load(folder)
    assert engine.optimizer.steps == 2
    assert jobs.steps_of(engine, "gpt-tiny", range(2, 4))


@pytest.mark.parametrize(("kind", "place"), [("fp32", "device"), ("bf16", "host"), ("int8", "device")])
def test_saved_and_resumed_it_goes_on_as_it_was(kind: str, place: str, tmp_path: Path) -> None:
    """What is rounded at random goes on with other random numbers, and so not to the bit."""
    settings = {"density": 0.05, "small": 300, "residual": kind, "place": place}
    optimizer = AdamW(lr=4e-3) if kind == "bf16" else SGD(lr=0.1, momentum=0.9)
    want = pool(2).run(jobs.train, "gpt-tiny", 8, settings, optimizer=optimizer, timeout_seconds=300)
    folder = jobs.folder_of(tmp_path)
    got = pool(2).run(jobs.resumed, "gpt-tiny", 8, 4, settings, folder, optimizer=optimizer, timeout_seconds=300)
    if kind == "int8":
        assert got[0][1] == pytest.approx(want[0][1], rel=0.02)
        return
    assert [answer[1] for answer in got] == [answer[1] for answer in want]
    assert all(torch.equal(got[0][0][key], value) for key, value in want[0][0].items())


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1), (1, 2)])
def test_what_waits_is_what_waited_with_other_ranks(before: int, after: int, tmp_path: Path) -> None:
    settings, folder = {"density": 0.05, "small": 300}, jobs.folder_of(tmp_path)
    saved = pool(before).run(jobs.waiting, "gpt-tiny", 4, settings, folder, load=False, timeout_seconds=300)
    loaded = pool(after).run(jobs.waiting, "gpt-tiny", 4, settings, folder, load=True, timeout_seconds=300)
    for key in saved[0][0]:
        want = sum(residuals[key].double() for residuals, _ in saved) / before
        got = sum(residuals[key].double() for residuals, _ in loaded) / after
        assert float((got - want).abs().max()) <= 1e-6 * float(want.abs().max()), key
    for _, said in loaded:
        assert f"saved by {before} ranks and loaded by {after}" in said[0]


def test_a_dense_engine_and_a_sparse_one_read_each_others_checkpoints(tmp_path: Path) -> None:
    folder = jobs.folder_of(tmp_path)
    sparse = jobs.engine_of("gpt-tiny", {"density": 0.05, "small": 300})
    jobs.steps_of(sparse, "gpt-tiny", range(4))
    sparse.save(folder)
    dense = Engine(
        zoo.build("gpt-tiny"), optimizer=sparse.optimizer.settings, memory=Memory(device="1GiB"), device="cpu", precision="fp32"
    )
    with pytest.warns(UserWarning, match="its residuals are dropped"):
        dense.load(folder)
    for (key, value), (_, other) in zip(dense.iter_state(), sparse.iter_state(), strict=True):
        assert torch.equal(value, other), key
    dense.save(folder)
    sparse.load(folder)
    assert not any(bool(value.any()) for value in jobs._residuals(sparse).values())
    jobs.steps_of(sparse, "gpt-tiny", range(4, 6))


@pytest.mark.parametrize(
    ("settings", "others", "words"),
    [
        ({"density": 0.0}, {}, "density=0.0"),
        ({"density": 2}, {}, "density=2"),
        ({"values": "int4"}, {}, "values='int4'"),
        ({"residual": "fp8"}, {}, "residual='fp8'"),
        ({"place": "disk"}, {}, "place='disk'"),
        ({"of": "weights"}, {}, "of='weights'"),
        ({"warm_up": -1}, {}, "warm_up=-1"),
        ({"check_every": 0}, {}, "check_every=0"),
        ({}, {"precision": "fp16"}, "fp16"),
        ({}, {"optimizer": AdamW(state="int8")}, "int8"),
        ({}, {"optimizer": SGD(momentum=0.9, nesterov=True)}, "nesterov"),
        ({}, {"optimizer": SGD(momentum=0.9, groups=[("*", {"dampening": 0.1})])}, "dampening"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], others: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        jobs.engine_of("gpt-tiny", settings, **others)


def test_reentrant_checkpointing_is_refused() -> None:
    class Reentrant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = checkpoint(self.inner, x, use_reentrant=True)
            return x.sum()

    engine = Engine(
        Reentrant(),
        optimizer=SGD(lr=0.1),
        memory=Memory(device="1GiB"),
        device="cpu",
        precision="fp32",
        exchange=Sparse(small=10),
    )
    with pytest.raises(RunError, match="reentrant"):
        engine.step(torch.randn(2, 64, requires_grad=True))
