"""Layers whose masters and states pass through the device for their update: the same numbers as everywhere else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import zoo
from scrimp.chunks.schedule.eviction import ScheduleStep
from scrimp.chunks.schedule.placement_search import choose_placement
from scrimp.chunks.schedule.step_cost import LayerCost, Rates
from scrimp.chunks.store.placement import DEVICE, STREAMED
from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.chunks.tables.table import Slot
from scrimp.chunks.update import streamed
from scrimp.engine import Engine, Memory
from scrimp.engine.update.streamed_update import largest_numel
from tests.engine.schedule.test_planning import STEPS, batches, model_of
from tests.engine.test_engine import LR, adamw, assert_same
from tests.support.reference import train_bf16


def streaming(engine: Engine) -> list[int]:
    return [k for k, placement in enumerate(engine._run.store.placements) if placement.tier == STREAMED]


def engine_for(device: int | str = "1GiB", **settings: Any) -> Engine:
    """Of a machine whose host is slow, so that passing wins, and whose device is full."""
    settings = {"optimizer": AdamW(lr=LR), "device": "cpu", **settings}
    engine = Engine(copy.deepcopy(model_of()), memory=Memory(device=device), **settings)
    engine._run.planning.rates = Rates(up=1e6, down=1e6, host=1e6, device=1e12, shared=1e6, price=0.1)
    engine._run.updating.saw = lambda nbytes, seconds: None
    engine._run.planning.overlapped = True
    engine._run.planning._on_device = frozenset()
    return engine


@pytest.mark.parametrize("clip", [None, 0.5])
def test_bits_are_those_of_plain_training(clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "TILE", 1 << 12)  # a layer takes several, and no slot is a multiple of it
    data = batches()[:STEPS]
    want, _ = train_bf16(model_of(), data, adamw, clip=clip)
    engine = engine_for(clip_norm=clip, skip_nonfinite=clip is not None)
    for step, batch in enumerate(data):
        engine.step(*batch)
        if step == 5:
            engine.save(tmp_path / "saved")
    assert len(streaming(engine)) > 1
    assert_same(engine.state_dict(), want)
    again = engine_for(clip_norm=clip, skip_nonfinite=clip is not None)
    again.load(tmp_path / "saved")
    for batch in data[6:]:
        again.step(*batch)
    assert_same(again.state_dict(), want)
    assert engine._run.planning.placements_back()
    assert not streaming(engine)
    assert_same(engine.state_dict(), want)


def test_the_ledger_knows_what_is_where() -> None:
    engine = engine_for(skip_nonfinite=False)
    host = engine.ledger.host.total_nbytes
    for batch in batches()[:6]:
        engine.step(*batch)
    store, layers = engine._run.store, streaming(engine)
    assert layers
    assert engine.ledger.host.total_nbytes == host - sum(store.placement_nbytes(k)[0] for k in layers)
    held = sum(store.nbytes(k) for k in layers) + streamed.stages_nbytes(3, largest_numel(store))
    assert engine.ledger.device.total_nbytes >= held
    assert engine._run.planning.placements_back()
    assert engine.ledger.host.total_nbytes == host


def test_a_nan_is_skipped_and_the_weights_are_as_they_were() -> None:
    engine = engine_for()
    for batch in batches()[:6]:
        engine.step(*batch)
    assert streaming(engine)
    before = engine.state_dict()
    broken = engine._run.model.register_forward_hook(lambda *_: _[-1] * float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        engine.step(*batches()[3])
    broken.remove()
    assert_same(engine.state_dict(), before)
    engine.step(*batches()[4])
    assert engine.optimizer.skipped == 1


@pytest.mark.parametrize("settings", [{"precision": "fp32"}, {"micro_batches": 2}, {"optimizer": SGD(lr=0.1)}])
def test_only_where_masters_and_states_are_all_that_would_pass(settings: dict[str, Any]) -> None:
    engine = engine_for(**settings)
    for batch in batches()[:6]:
        engine.step(*batch)
    assert not streaming(engine)


def test_stages_are_given_back_when_nothing_passes_any_more() -> None:
    engine = engine_for(skip_nonfinite=False)
    for batch in batches()[:6]:
        engine.step(*batch)
    assert streaming(engine)
    engine.close()
    assert not streaming(engine)
    assert engine.ledger.device.now["optimizer"] == engine.ledger.device.now["temporaries"] == 0


def test_two_shapes_of_batches_agree_on_what_passes() -> None:
    """Neither covers the other; what the first decided holds for the second, and nobody traces for ever."""
    engine = engine_for(skip_nonfinite=False)
    one, other = batches(seq=8, batch=4), batches(seq=16, batch=2)
    seen = []
    for step in range(12):
        engine.step(*one[step])
        engine.step(*other[step])
        seen.append(streaming(engine))
    assert seen[-1]
    assert all(found == seen[-1] for found in seen[5:])
    assert all(plan.choice is not None for plan in engine._run.planning._plans.values())


def test_no_room_for_homes_after_all_is_no_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(skip_nonfinite=False)
    host = engine.ledger.host.total_nbytes
    opened, failures = engine._run.store.open, []

    def full(layer: int) -> None:
        if engine._run.planning.current is not None and not engine._run.residents.active and not failures:
            failures.append(layer)
            raise torch.OutOfMemoryError("no room")
        opened(layer)

    monkeypatch.setattr(engine._run.store, "open", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    want, _ = train_bf16(model_of(), batches()[:STEPS], adamw)
    for batch in batches()[:STEPS]:
        engine.step(*batch)
    assert failures
    assert_same(engine.state_dict(), want)
    engine._run.planning.placements_back()
    assert engine.ledger.host.total_nbytes == host


def test_tiles_cover_every_slot_once_and_cut_at_multiples() -> None:
    sizes = [5, 64, 200, 3, 1, 129]
    slots, start = [], 0
    for k, size in enumerate(sizes):
        slots.append(Slot(name=str(k), shape=(size,), start=start, trainable=True))
        start += -(-size // 64) * 64
    for most in (64, 128, 192, 1024):
        found = streamed.update_tiles(slots, [1] * len(slots), most)
        assert all(tile.stop - tile.start <= most for tile in found)
        assert all(tile.start == tile.parts[0].start and tile.stop == tile.parts[-1].stop for tile in found)
        parts = [part for tile in found for part in tile.parts]
        covered = {part.slot.name: 0 for part in parts}
        for part in parts:
            assert (part.start - part.slot.start) % most == 0
            assert part.start == part.slot.start + covered[part.slot.name]
            covered[part.slot.name] += part.stop - part.start
        assert [covered[str(k)] for k in range(len(sizes))] == sizes


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("host", [0.5, 2.0, 8.0, 100.0])
def test_the_share_that_passes_is_the_best_of_all_shares(host: float, checked: bool) -> None:
    """Twelve equal layers that all fit: every number of passing layers is tried by hand."""
    layer = LayerCost(
        nbytes=2, placement_nbytes=12, down_nbytes=2, update_nbytes=28, again_seconds=0.01, movable=False, passable=True
    )
    schedule_steps = [ScheduleStep(needs=(k,), room_nbytes=1000) for k in range(12)]
    schedule_steps += [ScheduleStep(needs=(k,), room_nbytes=1000, ends=(k,)) for k in reversed(range(12))]
    rates = Rates(up=1.0, down=1.0, host=host, device=100.0, shared=0.6, price=1.3)
    found = choose_placement(schedule_steps, [layer] * 12, rates, update_room_nbytes=1000, compute=(0.12, 0.24), checked=checked)

    def by_hand(count: int) -> float:
        rest = 12 - count
        link = 12 * count / 0.6 + 2 * rest
        memory = (28 * rest + 1.3 * 12 * count) / host
        forward = 0.12 + 0.28 * count
        if checked:
            return max(0.24, 2 * rest) + max(forward, link, memory)
        return max(forward + 0.24, link, memory)

    assert by_hand(len(found.streamed)) <= min(by_hand(count) for count in range(13)) * 1.02
    if host == 100.0:
        assert not found.streamed


def by_hand(engine: Engine, place: str) -> None:
    """All homes that are not there are moved, and stay."""
    engine._run.planning.learn = lambda *_: None
    engine._run.updating.streaming(True)
    for layer, placement in enumerate(engine._run.store.placements):
        if placement.tier != place and engine._run.planning._passable(layer):
            engine._run.store.migrate(layer, place)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.usefixtures("_same_kernels_every_time")
@pytest.mark.parametrize("clip", [None, 0.5])
def test_on_a_gpu(clip: float | None) -> None:
    """Copies, updates and the step on streams of their own: every bit is that of homes on the device; and where it was
    chosen, beside the steps and after updates on the host, the losses are the same."""
    shape = {"layers": 6, "dim": 512, "heads": 8, "vocab": 2048, "seq": 128}
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", **shape)
    data = [zoo.example_batch("gpt-tiny", batch=8, step=k, **shape) for k in range(12)]
    found = {}
    for place in (DEVICE, STREAMED, "chosen"):
        engine = Engine(
            copy.deepcopy(model), memory=Memory(device="2GiB"), optimizer=AdamW(lr=LR), clip_norm=clip, skip_nonfinite=False
        )
        if place == "chosen":
            engine._run.planning.rates = Rates(up=1e10, down=1e10, host=1e9, device=1e12, shared=1e10, price=0.1)
            engine._run.updating.saw = lambda nbytes, seconds: None
            engine._run.planning._on_device = frozenset()
        else:
            by_hand(engine, place)
        losses = [float(engine.step(*batch)) for batch in data]
        assert bool(streaming(engine)) == (place != DEVICE)
        found[place] = losses, engine.state_dict()
        engine.close()
    assert found[STREAMED][0] == found[DEVICE][0]
    assert_same(found[STREAMED][1], found[DEVICE][1])
    assert found["chosen"][0] == pytest.approx(found[DEVICE][0], rel=2e-3)
