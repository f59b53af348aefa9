"""Layers whose masters and states pass through the device for their update: the same numbers as everywhere else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import zoo
from scrimp.chunks import _through
from scrimp.chunks._classes import choose
from scrimp.chunks._costs import LayerCost, Rates
from scrimp.chunks._home import DEVICE, THROUGH
from scrimp.chunks._optim import SGD, AdamW
from scrimp.chunks._residency import Moment
from scrimp.chunks._table import Slot
from scrimp.engine import Engine, Memory
from scrimp.engine._passing import largest_numel
from tests.reference import train_bf16
from tests.test_engine import LR, adamw, assert_same
from tests.test_engine_classes import STEPS, batches, model_of


def passing(engine: Engine) -> list[int]:
    return [k for k, home in enumerate(engine.store.homes) if home.place == THROUGH]


def engine_for(device: int | str = "1GiB", **settings: Any) -> Engine:
    """Of a machine whose host is slow, so that passing wins, and whose device is full."""
    settings = {"optimizer": AdamW(lr=LR), "device": "cpu", **settings}
    engine = Engine(copy.deepcopy(model_of()), memory=Memory(device=device), **settings)
    engine.planning.rates = Rates(up=1e6, down=1e6, host=1e6, device=1e12, shared=1e6, price=0.1)
    engine.updating.saw = lambda nbytes, seconds: None
    engine.planning.overlapped = True
    engine.planning._homes = frozenset()
    return engine


@pytest.mark.parametrize("clip", [None, 0.5])
def test_bits_are_those_of_plain_training(clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_through, "TILE", 1 << 12)  # a layer takes several, and no slot is a multiple of it
    data = batches()[:STEPS]
    want, _ = train_bf16(model_of(), data, adamw, clip=clip)
    engine = engine_for(clip_norm=clip, skip_nonfinite=clip is not None)
    for step, batch in enumerate(data):
        engine.step(*batch)
        if step == 5:
            engine.save(tmp_path / "saved")
    assert len(passing(engine)) > 1
    assert_same(engine.state_dict(), want)
    again = engine_for(clip_norm=clip, skip_nonfinite=clip is not None)
    again.load(tmp_path / "saved")
    for batch in data[6:]:
        again.step(*batch)
    assert_same(again.state_dict(), want)
    assert engine.planning.homes_back()
    assert not passing(engine)
    assert_same(engine.state_dict(), want)


def test_the_ledger_knows_what_is_where() -> None:
    engine = engine_for(skip_nonfinite=False)
    host = engine.ledger.host.total_nbytes
    for batch in batches()[:6]:
        engine.step(*batch)
    store, layers = engine.store, passing(engine)
    assert layers
    assert engine.ledger.host.total_nbytes == host - sum(store.home_nbytes(k)[0] for k in layers)
    held = sum(store.nbytes(k) for k in layers) + _through.stages_nbytes(3, largest_numel(store))
    assert engine.ledger.device.total_nbytes >= held
    assert engine.planning.homes_back()
    assert engine.ledger.host.total_nbytes == host


def test_a_nan_is_skipped_and_the_weights_are_as_they_were() -> None:
    engine = engine_for()
    for batch in batches()[:6]:
        engine.step(*batch)
    assert passing(engine)
    before = engine.state_dict()
    broken = engine.model.register_forward_hook(lambda *_: _[-1] * float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        engine.step(*batches()[3])
    broken.remove()
    assert_same(engine.state_dict(), before)
    engine.step(*batches()[4])
    assert engine.skipped == 1


@pytest.mark.parametrize("settings", [{"precision": "fp32"}, {"accumulate": 2}, {"optimizer": SGD(lr=0.1)}])
def test_only_where_masters_and_states_are_all_that_would_pass(settings: dict[str, Any]) -> None:
    engine = engine_for(**settings)
    for batch in batches()[:6]:
        engine.step(*batch)
    assert not passing(engine)


def test_stages_are_given_back_when_nothing_passes_any_more() -> None:
    engine = engine_for(skip_nonfinite=False)
    for batch in batches()[:6]:
        engine.step(*batch)
    assert passing(engine)
    engine.close()
    assert not passing(engine)
    assert engine.ledger.device.now["optimizer"] == engine.ledger.device.now["temporaries"] == 0


def test_two_shapes_of_batches_agree_on_what_passes() -> None:
    """Neither covers the other; what the first decided holds for the second, and nobody traces for ever."""
    engine = engine_for(skip_nonfinite=False)
    one, other = batches(seq=8, batch=4), batches(seq=16, batch=2)
    seen = []
    for step in range(12):
        engine.step(*one[step])
        engine.step(*other[step])
        seen.append(passing(engine))
    assert seen[-1]
    assert all(found == seen[-1] for found in seen[5:])
    assert all(plan.choice is not None for plan in engine.planning._plans.values())


def test_no_room_for_homes_after_all_is_no_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(skip_nonfinite=False)
    host = engine.ledger.host.total_nbytes
    opened, failures = engine.store.open, []

    def full(layer: int) -> None:
        if engine.planning.current is not None and not engine.residents.active and not failures:
            failures.append(layer)
            raise torch.OutOfMemoryError("no room")
        opened(layer)

    monkeypatch.setattr(engine.store, "open", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    want, _ = train_bf16(model_of(), batches()[:STEPS], adamw)
    for batch in batches()[:STEPS]:
        engine.step(*batch)
    assert failures
    assert_same(engine.state_dict(), want)
    engine.planning.homes_back()
    assert engine.ledger.host.total_nbytes == host


def test_tiles_cover_every_slot_once_and_cut_at_multiples() -> None:
    sizes = [5, 64, 200, 3, 1, 129]
    slots, start = [], 0
    for k, size in enumerate(sizes):
        slots.append(Slot(name=str(k), shape=(size,), start=start, trainable=True))
        start += -(-size // 64) * 64
    for most in (64, 128, 192, 1024):
        found = _through.tiles(slots, [1] * len(slots), most)
        assert all(tile.stop - tile.start <= most for tile in found)
        assert all(tile.start == tile.parts[0].start and tile.stop == tile.parts[-1].stop for tile in found)
        parts = [part for tile in found for part in tile.parts]
        covered = {part.slot.name: 0 for part in parts}
        for part in parts:
            assert (part.start - part.slot.start) % most == 0
            assert part.start == part.slot.start + covered[part.slot.name]
            covered[part.slot.name] += part.stop - part.start
        assert [covered[str(k)] for k in range(len(sizes))] == sizes


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize("host", [0.5, 2.0, 8.0, 100.0])
def test_the_share_that_passes_is_the_best_of_all_shares(host: float, judged: bool) -> None:
    """Twelve equal layers that all fit: every number of passing layers is tried by hand."""
    layer = LayerCost(nbytes=2, home_nbytes=12, down_nbytes=2, update_nbytes=28, again_seconds=0.01, movable=False, passable=True)
    moments = [Moment(needs=(k,), room_nbytes=1000) for k in range(12)]
    moments += [Moment(needs=(k,), room_nbytes=1000, ends=(k,)) for k in reversed(range(12))]
    rates = Rates(up=1.0, down=1.0, host=host, device=100.0, shared=0.6, price=1.3)
    found = choose(moments, [layer] * 12, rates, update_room_nbytes=1000, compute=(0.12, 0.24), judged=judged)

    def by_hand(count: int) -> float:
        rest = 12 - count
        link = 12 * count / 0.6 + 2 * rest
        memory = (28 * rest + 1.3 * 12 * count) / host
        forward = 0.12 + 0.28 * count
        if judged:
            return max(0.24, 2 * rest) + max(forward, link, memory)
        return max(forward + 0.24, link, memory)

    assert by_hand(len(found.through)) <= min(by_hand(count) for count in range(13)) * 1.02
    if host == 100.0:
        assert not found.through


def by_hand(engine: Engine, place: str) -> None:
    """All homes that are not there are moved, and stay."""
    engine.planning.learn = lambda *_: None
    engine.updating.passing(True)
    for layer, home in enumerate(engine.store.homes):
        if home.place != place and engine.planning._passable(layer):
            engine.store.move_home(layer, place)


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
    for place in (DEVICE, THROUGH, "chosen"):
        engine = Engine(
            copy.deepcopy(model), memory=Memory(device="2GiB"), optimizer=AdamW(lr=LR), clip_norm=clip, skip_nonfinite=False
        )
        if place == "chosen":
            engine.planning.rates = Rates(up=1e10, down=1e10, host=1e9, device=1e12, shared=1e10, price=0.1)
            engine.updating.saw = lambda nbytes, seconds: None
            engine.planning._homes = frozenset()
        else:
            by_hand(engine, place)
        losses = [float(engine.step(*batch)) for batch in data]
        assert bool(passing(engine)) == (place != DEVICE)
        found[place] = losses, engine.state_dict()
        engine.close()
    assert found[THROUGH][0] == found[DEVICE][0]
    assert_same(found[THROUGH][1], found[DEVICE][1])
    assert found["chosen"][0] == pytest.approx(found[DEVICE][0], rel=2e-3)
