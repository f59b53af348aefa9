"""Training within a budget equals plain Lightning, bit for bit in fp32 on one process: losses, rates, logs, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

pytest.importorskip("lightning", reason="lightning is not installed (it is in the dev extra)")
from lightning.pytorch.tuner import Tuner

from scrimp.errors import FitError, RunError
from scrimp.ext.lightning import Budget
from tests.ext.lightning.models import (
    LAYERS,
    MEMORY,
    SEQ,
    VOCAB,
    Seen,
    Tiny,
    adamw,
    fitted,
    loader,
    module_of,
    rows,
    same,
    trainer_of,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:The .* does not have many workers",
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated",
)


def sgd(module: Tiny) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, fused=True)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.3)]  # each epoch


def one_cycle(module: Tiny) -> Any:
    """It moves the rate and beta after every update."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=30)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rates_of_groups(module: Tiny) -> Any:
    optimizer = adamw(module)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (step + 1), lambda step: 0.9**step])
    return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]


def plateau(module: Tiny) -> Any:
    optimizer = adamw(module, lr=3e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=100.0)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two groups": ({"configure": rates_of_groups}, {"accumulate_grad_batches": 2}),
    # 6 batches are one group of four and one of two.
    # Lightning takes the norm in the order of the optimizer's groups, the engine in that of the model: here it is one order.
    "accumulation, clipping, a scheduler of steps": (
        {"configure": one_cycle},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "max_epochs": 3},
    ),
    "SGD, dropout, a scheduler of epochs": ({"configure": sgd, "dropout": 0.1}, {"gradient_clip_val": 1.0}),
    "a scheduler of validation losses": ({"configure": plateau}, {"max_epochs": 3, "val_check_interval": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_equals_plain_lightning(case: str) -> None:
    module, settings = CASES[case]
    plain, want = fitted(module_of(**module), **settings)
    within, got = fitted(module_of(**module), Budget(MEMORY), **settings)
    assert got == want
    assert within.global_step == plain.global_step
    assert same(weights_of(within), weights_of(plain))
    assert len(want.losses) == 6 * settings.get("max_epochs", 2)
    if "configure" in module:
        assert len({tuple(rates) for rates in got.rates}) > 1  # the scheduler moved them
    ledger = within.strategy.engine.ledger
    assert ledger.peak_nbytes <= 2 << 20


def test_the_budget_is_smaller_than_the_model_data() -> None:
    trainer, _ = fitted(module_of(), Budget(MEMORY), max_epochs=1)
    trained = sum(parameter.numel() for parameter in trainer.lightning_module.parameters())
    assert 16 * trained > 1.5 * (2 << 20)  # weight, gradient and two states, each of 4 bytes
    assert trainer.strategy.engine.ledger.host.total_nbytes > 0


def test_a_budget_that_is_too_small_says_the_least_one() -> None:
    with pytest.raises(FitError, match="budget") as error:
        fitted(module_of(), Budget("64KiB"), max_epochs=1)
    assert error.value.tier == "device"


class Extra(Tiny):
    """More outputs, logs in several places, a metric, a skipped batch."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.right = torchmetrics.MeanMetric()
        self.gain = torch.nn.Parameter(torch.ones(()))  # its own, used in training_step alone
        self.seen: list[Any] = []
        self.batches = 0
        self.model.tokens.register_forward_pre_hook(self.count)

    runs = 0

    @classmethod
    def count(cls, *_args: Any) -> None:
        cls.runs += 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        logits = self(batch) * self.gain
        self.batches += 1
        self.log("batches", self.batches, on_step=False, on_epoch=True, reduce_fx="sum")
        if batch_idx == 2:
            return None
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        self.log_dict({"gain": self.gain, "half": loss / 2}, on_step=False, on_epoch=True, batch_size=len(batch))
        self.right.update(logits.argmax(-1).eq(batch).float().mean())
        self.log("right", self.right, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits, "text": "kept"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            self.seen.append((outputs["text"], outputs["logits"].detach().clone(), float(outputs["loss"])))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("val_sum", self(batch).sum(), reduce_fx="sum")
        return super().validation_step(batch, batch_idx)


class Logs(Seen):
    def on_train_batch_end(self, *args: Any) -> None:
        """A skipped batch has no loss."""


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_outputs_logs_metrics_and_skipped_batches() -> None:
    """The engine repeats steps that do not fit, as with this budget: logs and metrics count once."""

    def run(budget: Budget | None) -> tuple[Any, Extra, Logs]:
        torch.manual_seed(0)
        Extra.runs = 0
        module, logs = Extra(), Logs()
        trainer = trainer_of(budget, logs, accumulate_grad_batches=2)
        torch.manual_seed(1)
        trainer.fit(module, loader(), loader(8, seed=1))
        module.ran = Extra.runs
        return trainer, module, logs

    (plain, a, want), (within, b, got) = run(None), run(Budget("540KiB"))
    assert b.ran > a.ran  # some steps ran more than once
    assert got.logged == want.logged
    assert a.batches == b.batches == 12  # skipped ones too
    assert {"gain", "half", "right", "val_sum", "batches"} <= {*got.logged[0]}
    assert len(b.seen) == len(a.seen) == 10
    for (text, logits, loss), (text_a, logits_a, loss_a) in zip(b.seen, a.seen, strict=True):
        assert (text, loss) == (text_a, loss_a)
        assert torch.equal(logits, logits_a)
    assert same(weights_of(within), weights_of(plain))


def test_validate_test_and_predict() -> None:
    plain, _ = fitted(module_of(), max_epochs=1)
    within, _ = fitted(module_of(), Budget(MEMORY), max_epochs=1)
    data = loader(8, seed=2)
    for run in ("validate", "test"):
        assert getattr(within, run)(dataloaders=data, verbose=False, model=within.lightning_module) == getattr(plain, run)(
            dataloaders=data, verbose=False, model=plain.lightning_module
        )
    got, want = (each.predict(each.lightning_module, data) for each in (within, plain))
    assert torch.equal(torch.cat(got), torch.cat(want))
    assert within.strategy.engine.ledger.peak_nbytes <= 2 << 20


def test_without_fit_there_are_no_optimizer_states() -> None:
    data, module = loader(8, seed=2), module_of()
    want = trainer_of().test(module_of(), data, verbose=False)
    trainer = trainer_of(Budget("512KiB"))  # of 825 KB of weights
    assert trainer.test(module, data, verbose=False) == want
    assert "optimizer" not in str(trainer.strategy.engine.ledger.host.snapshot())
    with pytest.raises(RunError, match=r"without optimizer states.*make a new module"):
        trainer_of(Budget("512KiB")).fit(module, data, data)


class MonteCarlo(Tiny):
    def on_validation_model_eval(self) -> None:
        """Dropout stays on."""


def test_modes_that_hooks_choose_for_validation_are_kept() -> None:
    def run(budget: Budget | None) -> list[Any]:
        torch.manual_seed(0)
        module = MonteCarlo(dropout=0.5)
        torch.manual_seed(2)
        return [trainer_of(budget).validate(module, loader(8), verbose=False) for _ in range(1)]

    assert run(Budget(MEMORY)) == run(None)
    assert run(None) != [trainer_of().validate(module_of(dropout=0.5), loader(8), verbose=False)]


@pytest.mark.parametrize(("flag", "precision"), [("32-true", "fp32"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16")])
def test_precision_follows_the_trainer(flag: str, precision: str) -> None:
    trainer, seen = fitted(module_of(), Budget(MEMORY), precision=flag, max_epochs=1)
    assert trainer.strategy.engine.save  # there is one
    assert {value.dtype for value in weights_of(trainer).values()} == {torch.float32}  # masters
    first = next(iter(trainer.lightning_module.parameters()))
    assert first.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert seen.losses[-1] < seen.losses[0]


def test_the_budget_may_choose_the_precision() -> None:
    trainer, _ = fitted(module_of(), Budget(MEMORY, precision="bf16"), max_epochs=1)
    assert next(iter(trainer.lightning_module.parameters())).dtype == torch.bfloat16


def test_a_module_may_be_on_meta() -> None:
    values = module_of().state_dict()
    with torch.device("meta"):
        module = Tiny(lambda module: torch.optim.AdamW(module.parameters(), lr=3e-3, foreach=False))
    trainer = trainer_of(Budget(MEMORY, weights=values), max_epochs=1)
    with pytest.warns(UserWarning, match="without fused=True"):
        trainer.fit(module, loader(4), loader(8, seed=1))
    want = module_of(lambda module: torch.optim.AdamW(module.parameters(), lr=3e-3, fused=True))
    plain, _ = fitted(want, max_epochs=1, train=loader(4))
    assert same(weights_of(trainer), weights_of(plain))


class Warm(Tiny):
    """Sets the rate in optimizer_step, as Lightning's documentation shows."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (self.trainer.global_step + 1)
        optimizer.step(closure=optimizer_closure)


def test_rates_that_optimizer_step_sets() -> None:
    def run(budget: Budget | None) -> Any:
        torch.manual_seed(0)
        return fitted(Warm(), budget)

    (plain, want), (within, got) = run(None), run(Budget(MEMORY))
    assert got == want
    assert same(weights_of(within), weights_of(plain))


class Rated(Tiny):
    lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


def test_the_tuner_finds_the_same_rate(tmp_path: Path) -> None:
    """It trains, and puts the first weights and states back from a checkpoint. Then fit begins anew."""

    def run(budget: Budget | None) -> Any:
        torch.manual_seed(0)
        module, trainer = Rated(), trainer_of(budget, default_root_dir=tmp_path, max_epochs=1)
        found = Tuner(trainer).lr_find(module, loader(), loader(8, seed=1), num_training=8)
        trainer.fit(module, loader(), loader(8, seed=1))
        return found.results, module.lr, weights_of(trainer)

    (want, want_lr, plain), (got, got_lr, within) = run(None), run(Budget(MEMORY))
    assert (got, got_lr) == (want, want_lr)
    assert same(within, plain)


def test_a_module_that_is_one_layer() -> None:
    """The engine wraps the LightningModule itself, and may recompute all of it."""

    class Line(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))

    def run(budget: Budget | None) -> Any:
        torch.manual_seed(0)
        return fitted(Line(), budget)

    (plain, want), (within, got) = run(None), run(Budget("256KiB", activations="recompute"))
    assert got == want
    assert same(weights_of(within), weights_of(plain))


def test_it_is_called_by_the_names_of_lightning() -> None:
    trainer, _ = fitted(module_of(), Budget(MEMORY), max_epochs=1)
    assert {*weights_of(trainer)} == {*module_of().state_dict()}
    assert sum("blocks" in name for name in weights_of(trainer)) == 12 * LAYERS
    assert rows(2).shape == (2, SEQ)
