"""A FitError names the least budget that works: the next try works, and with 2 % less it does not.

On the CPU the meter enforces the very number that the trial measured. 2 % are left for kernels that take other scratch memory
in another process, and for the rounding of what is printed, which is at most 0.1 %.
"""

from __future__ import annotations

import copy
import pickle
import re
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from scrimp import zoo
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.engine import Engine, Memory
from scrimp.engine.step.abandon import Leftovers
from scrimp.errors import FitError
from scrimp.ext.ranks import pool
from scrimp.ledger import format_least, parse_nbytes
from tests.engine.test_engine import assert_same, batches_of, everything, model_of
from tests.rank_jobs import engine as jobs

LESS = 0.98


def engine_for(model: nn.Module, **settings: Any) -> Engine:
    sizes = {name: settings.pop(name) for name in ("device", "host", "disk") if name in settings}
    return Engine(copy.deepcopy(model), memory=Memory(**{"device": "1GiB", **sizes}), device="cpu", **settings)


def printed(error: FitError, tier: str) -> str:
    """The first budget in the message that can be typed in."""
    found = re.search(rf"{tier}='([^']+)'", str(error))
    assert found, error
    return found[1]


# As people type it.


@given(st.integers(0, 1 << 52))
def test_what_is_printed_is_no_less_and_hardly_more(nbytes: int) -> None:
    found = parse_nbytes(format_least(nbytes))
    assert nbytes <= found <= nbytes + max(1, nbytes // 1000 + 1)


def test_sizes_are_short() -> None:
    sizes = [0, 1000, 1024, 1025, 3 << 29, (5 << 30) + 1, 7 << 40]
    assert [format_least(nbytes) for nbytes in sizes] == ["0 B", "1000 B", "1 KiB", "1.001 KiB", "1.5 GiB", "5.001 GiB", "7 TiB"]


def test_an_error_is_the_same_without_what_it_holds() -> None:
    try:
        raise FitError("words", least_nbytes=5, tier="host") from ValueError()
    except FitError as error:
        for other in (error.bare(), pickle.loads(pickle.dumps(error))):
            assert (other.args, other.least_nbytes, other.tier) == (("words",), 5, "host")
            assert other.__cause__ is None
            assert other.__traceback__ is None


# The device.


@pytest.mark.parametrize(
    ("name", "precision", "recompute", "share"),
    [
        ("gpt-tiny", "fp32", "auto", 0.3),
        ("gpt-tiny", "bf16", "keep", 0.6),
        pytest.param("moe-tiny", "bf16", "auto", 0.9, marks=pytest.mark.full),
        ("resnet-tiny", "fp32", "recompute,offload", 0.5),
        pytest.param("vgg-tiny", "fp16", "auto", 0.7, marks=pytest.mark.full),
    ],
)
def test_the_least_device_budget_works_at_once(name: str, precision: str, recompute: str, share: float) -> None:
    """And the step that failed has changed nothing."""
    settings: dict[str, Any] = {"precision": precision, "activations": recompute}
    batch = batches_of(name)[0]
    roomy = engine_for(model_of(name), **settings)
    want = [roomy.step(*batch).item() for _ in range(3)]
    tight = engine_for(model_of(name), device=max(roomy._run.fit._largest, int(share * 300_000)), **settings)
    before, random = copy.deepcopy(everything(tight)), torch.get_rng_state()
    with pytest.raises(FitError, match=r"The least that works for this batch is Memory\(device='[0-9.]+ .iB'\)") as caught:
        tight.step(*batch)
    assert_same(everything(tight), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert tight.optimizer.steps == 0
    assert caught.value.tier == "device"
    least = caught.value.least_nbytes
    assert least is not None
    for device in (least, printed(caught.value, "device")):
        engine = engine_for(model_of(name), device=device, **settings)
        assert [engine.step(*batch).item() for _ in range(3)] == want
        assert engine.ledger.peak_nbytes <= engine._run.budget.device_nbytes
    with pytest.raises(FitError) as again:
        engine_for(model_of(name), device=int(LESS * least), **settings).step(*batch)
    assert again.value.least_nbytes == pytest.approx(least, rel=1 - LESS)


def test_a_larger_batch_in_the_middle_of_training() -> None:
    shape = {"layers": 4, "seq": 32}
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", **shape)
    small, large = (zoo.example_batch("gpt-tiny", batch=batch, step=0, **shape) for batch in (2, 16))
    engine = engine_for(model, device="700KiB")
    for _ in range(4):
        engine.step(*small)
    state = engine.state_dict()
    with pytest.raises(FitError, match="step 4 needs") as caught:
        engine.step(*large)
    assert_same(engine.state_dict(), state)
    engine.step(*small)
    assert caught.value.least_nbytes is not None
    engine_for(model, device=caught.value.least_nbytes).step(*large)
    with pytest.raises(FitError):
        engine_for(model, device=int(LESS * caught.value.least_nbytes)).step(*large)


def test_an_evaluation_names_its_least_too() -> None:
    tokens = torch.zeros(64, 32, dtype=torch.long)
    engine = engine_for(model_of("gpt-tiny"), device="400KiB")
    with pytest.raises(FitError, match=r"The least that works for this evaluation is Memory\(device='") as caught:
        engine.evaluate(tokens, tokens)
    assert caught.value.least_nbytes is not None
    enough = engine_for(model_of("gpt-tiny"), device=caught.value.least_nbytes)
    assert enough.evaluate(tokens, tokens) is not None
    with pytest.raises(FitError):
        engine_for(model_of("gpt-tiny"), device=int(LESS * caught.value.least_nbytes)).evaluate(tokens, tokens)


def test_weights_that_do_not_fit_name_the_least_for_weights() -> None:
    with pytest.raises(FitError, match=r"The least for the weights of every layer is .*the first step says how much") as caught:
        engine_for(model_of("gpt-tiny"), device="1KiB")
    least = caught.value.least_nbytes
    assert least is not None
    engine_for(model_of("gpt-tiny"), device=printed(caught.value, "device"))
    engine_for(model_of("gpt-tiny"), device=least)
    with pytest.raises(FitError):
        engine_for(model_of("gpt-tiny"), device=least - 1)


def test_no_trial_where_the_machine_has_no_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrimp.engine.entry.least_budget.available_host_nbytes", lambda: 100 << 10)
    engine = engine_for(model_of("gpt-tiny"), device="60KiB", activations="keep", precision="fp32")
    with pytest.raises(FitError, match=r"enough is more than this machine has left to try it with, .* KiB") as caught:
        engine.step(*batches_of("gpt-tiny")[0])
    assert caught.value.least_nbytes is None
    assert engine.ledger.peak_nbytes <= 180 << 10


def test_all_ranks_name_the_same_least_and_it_works() -> None:
    (first, works, less), other = pool(2).run(jobs.least_device, "gpt-tiny", "60KiB", LESS, timeout_seconds=120)
    assert other == (first, works, less)
    assert first is not None
    assert works is None
    assert less == pytest.approx(first, rel=1 - LESS)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("in backward")


def test_a_backward_that_failed_leaves_no_activations() -> None:
    """Torch keeps what was still to run, until a later backward takes it out: so the next try had less room."""
    left = Leftovers()
    left.begin()
    x = torch.ones(4, requires_grad=True)
    kept = x.exp()
    gone = weakref.ref(kept.untyped_storage())
    out = (kept * kept).sum() + Fails.apply(x.sin()).sum()
    with pytest.raises(ValueError, match="in backward"):
        out.backward()
    del kept, out
    assert gone() is not None  # else torch keeps nothing any more, and Leftovers is not needed
    left.clear()
    assert gone() is None


# Host and disk, before anything is allocated.


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_least_host_budget_works_at_once(on_disk: bool, precision: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "400KiB", "precision": precision, "disk": tmp_path if on_disk else None}
    with pytest.raises(FitError, match=r"The least that works is Memory\(host='[0-9.]+ .iB'\)") as caught:
        engine_for(model_of("gpt-tiny"), host="10KiB", **settings)
    least = caught.value.least_nbytes
    assert caught.value.tier == "host"
    assert least is not None
    for host in (least, printed(caught.value, "host")):
        engine_for(model_of("gpt-tiny"), host=host, **settings)
    with pytest.raises(FitError):
        engine_for(model_of("gpt-tiny"), host=least - 1, **settings)
    adds_up(re.search(r"(?:takes|disk) (.*?) (?:on|of).*?\((.*?)\)", str(caught.value)))
    if not on_disk:  # the other ways that it names
        engine_for(model_of("gpt-tiny"), **{**settings, "host": "10KiB", "device": printed(caught.value, "device")})
        disk = re.search(r"disk=folder, host='(.*?)'\) with (.*?) free", str(caught.value))
        assert disk
        engine = engine_for(model_of("gpt-tiny"), **{**settings, "host": disk[1], "disk": tmp_path})
        assert sum(placement.file.nbytes for placement in engine._run.store.placements if placement.file) <= parse_nbytes(disk[2])


SIZE = r"[0-9.]+ (?:B|[KMGT]iB)"


def adds_up(found: re.Match[str] | None) -> None:
    """Each size is rounded to half of a tenth of its unit."""
    assert found
    parts = re.findall(SIZE, found[2])
    assert len(parts) >= 3
    rounding = sum(parse_nbytes(f"1 {size.split()[1]}") * 0.05 + 1 for size in (found[1], *parts))
    assert abs(parse_nbytes(found[1]) - sum(map(parse_nbytes, parts))) <= rounding, found[0]


def test_the_least_room_on_disk_works_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=64 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    settings: dict[str, Any] = {"disk": tmp_path / "new", "device": "400KiB"}
    with pytest.raises(FitError) as caught:
        engine_for(model_of("gpt-tiny"), host="10KiB", **settings)
    assert caught.value.least_nbytes is not None
    host = caught.value.least_nbytes
    words = r"no room for spill files of .* layers, 1 ranks here\): 64\.0 KiB are free in .*new\. Make room there for (.*) in all"
    with pytest.raises(FitError, match=words) as caught:
        engine_for(model_of("gpt-tiny"), host=host, **settings)
    assert caught.value.tier == "disk"
    assert caught.value.least_nbytes is not None
    engine_for(model_of("gpt-tiny"), **{**settings, "host": printed(caught.value, "host")})  # the other way that it names
    for usage.free in (caught.value.least_nbytes, parse_nbytes(re.search(words, str(caught.value))[1])):  # type: ignore[index]
        engine = engine_for(model_of("gpt-tiny"), host=host, **settings)
        assert (
            sum(placement.file.nbytes for placement in engine._run.store.placements if placement.file)
            == caught.value.least_nbytes
        )
    usage.free = caught.value.least_nbytes - 1
    with pytest.raises(FitError):
        engine_for(model_of("gpt-tiny"), host=host, **settings)


# The host, in a step that offloads.


@pytest.mark.parametrize("on_disk", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_least_host_budget_of_a_step_that_offloads(on_disk: bool, tmp_path: Path) -> None:
    shape = {"layers": 6, "seq": 64, "dim": 32}
    torch.manual_seed(0)
    model, batch = zoo.build("gpt-tiny", **shape), zoo.example_batch("gpt-tiny", batch=4, step=0, **shape)
    settings: dict[str, Any] = {"optimizer": AdamW(), "disk": tmp_path if on_disk else None}
    with pytest.raises(FitError) as of_device:
        engine_for(model, device="200KiB", **settings).step(*batch)
    assert of_device.value.least_nbytes is not None
    settings["device"] = of_device.value.least_nbytes  # which is enough with offloaded inputs
    data = engine_for(model, **settings)._run.fit
    host = data.least_host_nbytes() if on_disk else data._total  # without a disk more than that would go to the device
    tight = engine_for(model, host=host + 1000, **settings)
    before = tight.state_dict()
    words = r"The least that works for this batch is Memory\(host='.*'\) with this device budget, or Memory\(device='.*'\) with"
    with pytest.raises(FitError, match=words) as caught:
        tight.step(*batch)
    assert_same(tight.state_dict(), before)
    assert tight.ledger.host.peak_nbytes <= tight._run.budget.host_nbytes
    adds_up(re.search(r"host they need (.*?) or more of .*? there \((.*?)\)", str(caught.value)))
    least = caught.value.least_nbytes
    assert caught.value.tier == "host"
    assert least is not None
    for host in (least, printed(caught.value, "host")):
        engine = engine_for(model, host=host, **settings)
        engine.step(*batch)
        assert engine._run.recompute.offloaded
        assert engine.ledger.host.peak_nbytes <= engine._run.budget.host_nbytes
    with pytest.raises(FitError):
        engine_for(model, host=int(LESS * least), **settings).step(*batch)
    settings["device"] = printed(caught.value, "device")  # the other way that it names
    engine_for(model, host=tight._run.budget.host_nbytes, **settings).step(*batch)
