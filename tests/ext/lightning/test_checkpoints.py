"""Checkpoints of Lightning within a budget: a resumed run equals the uninterrupted one; files with weights are Lightning's."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed (it is in the dev extra)")
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from scrimp.errors import CheckpointError, RunError
from scrimp.ext.lightning import Budget
from scrimp.ext.lightning._json import as_json, from_json
from tests.ext.lightning.models import MEMORY, Tiny, adamw, fitted, loader, module_of, same, trainer_of, weights_of
from tests.ext.lightning.test_training import one_cycle, pytestmark  # noqa: F401 - the same filters

SETTINGS: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def saver(folder: Path, **settings: Any) -> ModelCheckpoint:
    chosen = {"monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}", **settings}
    return ModelCheckpoint(folder, **chosen)


def callbacks(folder: Path, **settings: Any) -> list[Any]:
    return [saver(folder, **settings), EarlyStopping("val_loss", patience=5)]


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """With dropout, a scheduler, accumulation and clipping, in another budget."""

    def module() -> Tiny:
        return module_of(one_cycle, dropout=0.1)

    settings = {**SETTINGS, "enable_checkpointing": True}
    whole, want = fitted(module(), Budget(MEMORY), *callbacks(tmp_path / "whole"), max_epochs=4, **settings)
    half = fitted(module(), Budget(MEMORY), *callbacks(tmp_path / "half"), max_epochs=2, **settings)[0]
    last = Path(half.checkpoint_callback.last_model_path)
    assert last.is_dir()
    torch.manual_seed(99)
    budget = Budget("3MiB")  # another one
    rest, got = fitted(module(), budget, *callbacks(tmp_path / "half"), max_epochs=4, ckpt_path=last, **settings)
    assert got.losses == want.losses[12:]
    assert got.rates == want.rates[12:]
    assert got.logged[-1] == want.logged[-1]
    assert rest.global_step == whole.global_step
    assert same(weights_of(rest), weights_of(whole))
    for mine, theirs in zip(rest.callbacks, whole.callbacks, strict=True):
        if isinstance(mine, ModelCheckpoint):
            assert mine.best_model_score == theirs.best_model_score
            assert sorted(map(float, mine.best_k_models.values())) == sorted(map(float, theirs.best_k_models.values()))
            assert {path.name for path in (tmp_path / "half").iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}


def test_the_weights_in_a_folder_and_in_a_file_are_full(tmp_path: Path) -> None:
    trainer, _ = fitted(module_of(), Budget(MEMORY), max_epochs=1)
    plain, _ = fitted(module_of(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    again = Tiny.load_from_checkpoint(tmp_path / "weights.ckpt", configure=adamw, weights_only=False)
    assert same(again.state_dict(), weights_of(plain))
    assert again.hparams["dropout"] == 0.0

    trainer.save_checkpoint(tmp_path / "full.ckpt")
    manifest = json.loads((tmp_path / "full.ckpt" / "manifest.json").read_text())
    assert all(entry["trainable"] for entry in manifest["entries"].values())
    fresh = module_of()
    resumed, _ = fitted(fresh, Budget(MEMORY), max_epochs=1, ckpt_path=tmp_path / "full.ckpt")  # nothing is left to train
    assert same(weights_of(resumed), weights_of(plain))


def test_a_file_of_weights_is_tested_within_the_budget(tmp_path: Path) -> None:
    plain, _ = fitted(module_of(), max_epochs=1)
    plain.save_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    data = loader(8, seed=2)
    want = plain.test(plain.lightning_module, data, verbose=False)
    got = trainer_of(Budget(MEMORY)).test(module_of(), data, ckpt_path=tmp_path / "plain.ckpt", weights_only=False, verbose=False)
    assert got == want


def test_the_best_checkpoint_after_fit(tmp_path: Path) -> None:
    trainer, seen = fitted(
        module_of(), Budget(MEMORY), saver(tmp_path, save_top_k=1, save_last=False), enable_checkpointing=True, max_epochs=3
    )
    best = min(row["val_loss"] for row in seen.logged)
    found = trainer.validate(dataloaders=loader(8, seed=1), ckpt_path="best", verbose=False)
    assert [row["val_loss"] for row in found] == [best]
    assert len([*tmp_path.iterdir()]) == 1  # the others are removed


def test_a_second_fit_needs_a_checkpoint(tmp_path: Path) -> None:
    """Plain Lightning begins a second fit with new optimizer states, which the engine cannot."""
    module = module_of()
    trainer, _ = fitted(module, Budget(MEMORY), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(RunError, match="still has the optimizer's states"):
        fitted(module, Budget(MEMORY), max_epochs=1)
    more, got = fitted(module, Budget(MEMORY), max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    whole, want = fitted(module_of(), max_epochs=2)
    assert got.losses == want.losses[6:]
    assert same(weights_of(more), weights_of(whole))


def test_engine_and_module_are_freed_together() -> None:
    trainer, _ = fitted(module_of(), Budget(MEMORY), max_epochs=1)
    gone = weakref.ref(trainer.strategy.engine)
    del trainer, _
    gc.collect()
    assert gone() is None


def test_files_that_cannot_be_continued(tmp_path: Path) -> None:
    plain, _ = fitted(module_of(), max_epochs=1)
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=r"goes on from folders that it wrote.*load_from_checkpoint"):
        fitted(module_of(), Budget(MEMORY), ckpt_path=tmp_path / "plain.ckpt")
    within, _ = fitted(module_of(), Budget(MEMORY), max_epochs=1)
    within.save_checkpoint(tmp_path / "full.ckpt")
    with pytest.raises(CheckpointError, match="weights_only=True"):
        trainer_of(Budget(MEMORY)).test(module_of(), loader(8), ckpt_path=tmp_path / "full.ckpt")
    within.strategy.engine.save(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="no state of a Lightning Trainer"):
        fitted(module_of(), Budget(MEMORY), ckpt_path=tmp_path / "bare")
    with pytest.raises(CheckpointError, match="not on a local disk"):
        within.save_checkpoint("s3://bucket/one.ckpt")


class Strips(Tiny):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"numbers": (1, 2.5), 3: torch.arange(2)}
        for name in [name for name in checkpoint["state_dict"] if "ln" in name]:
            del checkpoint["state_dict"][name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["mine"]


def test_hooks_that_change_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer, _ = fitted(Strips(), Budget(MEMORY), max_epochs=1)
    with pytest.raises(CheckpointError, match="on_save_checkpoint changed"):
        trainer.save_checkpoint(tmp_path / "full.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=False)
    assert {*saved["state_dict"]} == {name for name in weights_of(trainer) if "ln" not in name}


def test_hyperparameters_that_json_cannot_hold(tmp_path: Path) -> None:
    module = module_of()
    module.save_hyperparameters({"inner": object()})
    trainer, _ = fitted(module, Budget(MEMORY), max_epochs=1)
    with pytest.warns(UserWarning, match=r"hyper_parameters\['inner'\] is a object.*ignore=\['inner'\]"):
        trainer.save_checkpoint(tmp_path / "one.ckpt")


def test_state_of_a_callback_that_json_cannot_hold(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    class Keeps(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"what": object()}

    trainer, _ = fitted(module_of(), Budget(MEMORY), Keeps(), max_epochs=1)
    with pytest.raises(CheckpointError, match=r"Keeps'\]\['what'\] is a object, which JSON cannot hold"):
        trainer.save_checkpoint(tmp_path / "one.ckpt")


def test_values_come_back_as_they_were() -> None:
    state = {
        "plain": [1, True, None, "text", 0.1, 1e-300],
        "floats": [float("inf"), float("-inf")],
        "tuple": (1, (2, 3)),
        "set": {1, 2},
        "mapping": {1: "a", ("x", 2): "b", "__scrimp__": "c"},
        "path": str(Path("a/b")),
    }
    assert from_json(json.loads(json.dumps(as_json(state, "state")))) == state
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.tensor([[1.1, 0.0], [-3.3, 7.0]]).to(dtype)
        back = from_json(json.loads(json.dumps(as_json(tensor, "tensor"))))
        assert back.dtype == dtype
        assert torch.equal(back, tensor)
    assert torch.equal(from_json(as_json(torch.tensor(3), "scalar")), torch.tensor(3))
    with pytest.raises(CheckpointError, match="tensor of 5000 elements"):
        as_json(torch.zeros(5000), "state")
