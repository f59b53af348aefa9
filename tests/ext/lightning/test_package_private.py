"""Names of Lightning and torchmetrics that are not public: these tests say when they change."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed (it is in the dev extra)")
import lightning.pytorch as pl
import torchmetrics

from scrimp.errors import RunError
from scrimp.ext.lightning import _package_private as private
from scrimp.ext.lightning._settings import precision_of
from tests.ext.lightning.models import trainer_of
from tests.ext.lightning.test_training import pytestmark  # noqa: F401 - the same filters


def test_the_package_that_the_program_has_imported_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private.package() is pl
    other = ModuleType("pytorch_lightning")
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other)
    assert private.package() is pl  # both are there
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert private.package() is other


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.setattr(private, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="pip install lightning"):
        private.package()


def test_lightning_has_the_names() -> None:
    trainer: Any = trainer_of()
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        assert loop.inference_mode is True
    strategy = pl.strategies.DDPStrategy()
    assert private.changes_layers(strategy) is None
    strategy = pl.Trainer(accelerator="cpu", strategy=strategy, sync_batchnorm=True, logger=False).strategy
    assert private.changes_layers(strategy) is not None


def test_a_metric_that_is_restored_is_as_it_was() -> None:
    module = torch.nn.Module()
    module.mean, module.cat = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
    module.both = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
    metrics = private.Metrics(module)

    def update(value: float) -> None:
        module.mean.update(value)
        module.cat.update(torch.tensor([value]))
        module.both.update(torch.tensor([value]), torch.tensor([1.0]))

    update(2.0)
    before = metrics.state()
    update(100.0)
    metrics.restore(before)
    update(4.0)
    assert float(module.mean.compute()) == 3.0
    assert module.cat.compute().tolist() == [2.0, 4.0]
    found = module.both.compute()
    assert (float(found["MeanSquaredError"]), float(found["MeanAbsoluteError"])) == (5.0, 2.0)
    metrics.restore(before)  # again: the kept state was not changed
    assert float(module.mean.compute()) == 2.0


def test_the_door_loads_lightning_when_it_is_used() -> None:
    code = "import sys, scrimp.ext.lightning; assert not {'lightning', 'pytorch_lightning', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fp16_is_mixed_precision() -> None:
    plugin = pl.plugins.MixedPrecision("16-mixed", "cuda", scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert precision_of(plugin, None) == "fp16"
    with pytest.raises(RunError, match="the plugin Other is not possible"):
        precision_of(type("Other", (pl.plugins.Precision,), {})(), None)
