"""What has no effect under a budget raises or warns, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed (it is in the dev extra)")
import lightning.pytorch as pl
from lightning.pytorch import callbacks

from scrimp.errors import RunError
from scrimp.exchange import Sparse
from scrimp.ext.lightning import Budget
from tests.ext.lightning.models import MEMORY, Tiny, adamw, fitted, loader, module_of, trainer_of
from tests.ext.lightning.test_training import pytestmark  # noqa: F401 - the same filters


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Backward(Tiny):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Clips(Tiny):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        pass


class Reads(Tiny):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class NoTensor(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 3.0


class Compiled(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model)  # type: ignore[assignment]


class Freezes(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)


def with_optimizer(make: Callable[[Tiny], Any]) -> Callable[[], Tiny]:
    return lambda: Tiny(make)


REFUSED: dict[str, tuple[Callable[[], Tiny], dict[str, Any], str]] = {
    "manual": (Manual, {}, "automatic optimisation.*docs/howto/lightning.md"),
    "backward": (Backward, {}, "Backward.backward would not be called.*register_hook"),
    "clipping": (Clips, {}, "configure_gradient_clipping would not be called.*gradient_clip_val"),
    "an iterator": (Reads, {}, "another batch; take .batch, batch_idx"),
    "no loss": (NoTensor, {}, "training_step returned float"),
    "compiled": (Compiled, {}, "compile"),
    "clipping by value": (Tiny, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='norm'"),
    "batch norm of all ranks": (Tiny, {"sync_batchnorm": True}, "sync_batchnorm"),
    "a schedule of accumulation": (
        Tiny, {"callbacks": [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]}, "accumulate_grad_batches="
    ),
    "averaged weights": (Tiny, {"callbacks": [callbacks.StochasticWeightAveraging(1e-2)]}, "average checkpoints after training"),
    "finetuning": (Tiny, {"callbacks": [Freezes()]}, "freeze before fit"),
    "pruning": (Tiny, {"callbacks": [callbacks.ModelPruning("l1_unstructured")]}, "prune after training"),
    "another optimizer": (with_optimizer(lambda m: torch.optim.RMSprop(m.parameters())), {}, "RMSprop.*AdamW.*SGD"),
    "amsgrad": (with_optimizer(lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True, fused=True)), {}, "amsgrad=True"),
    "weights without a group": (with_optimizer(lambda m: adamw_of(m.model.blocks)), {}, "no group"),
}  # fmt: skip


def adamw_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), fused=True)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated", "ignore:You are using the .dataloader_iter. step flavor"
)
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_a_remedy(case: str) -> None:
    make, settings, words = REFUSED[case]
    with pytest.raises(RunError, match=f"(?s){words}"):
        trainer_of(Budget(MEMORY), *settings.pop("callbacks", ()), **settings).fit(make(), loader(), loader(8))


FLAGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"precision": "64-true"}, {}, "precision='64-true'.*bf16-mixed"),
    ({"precision": "16-true"}, {}, "precision='16-true'.*16-mixed"),
    ({"precision": "bf16-mixed"}, {"precision": "fp32"}, "differ; give one of them"),
    ({}, {"precision": "int8"}, "precision='int8'.*'fp32', 'bf16' and 'fp16'"),
    ({"devices": 2}, {}, "torchrun --nproc-per-node 2"),
    ({}, {"plan": object()}, "scrimp.Engine.model, plan=plan"),
]


@pytest.mark.parametrize(("flags", "settings", "words"), FLAGS)
def test_flags_that_are_refused(flags: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        trainer_of(Budget(MEMORY, **settings), **flags)


class Hooks(Tiny):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(parameter.grad is None for parameter in self.parameters())


class Callback(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pass


def test_hooks_that_would_read_gradients_warn() -> None:
    with pytest.warns(UserWarning, match="Hooks.on_before_optimizer_step is called, but parameters have no gradients"):
        fitted(Hooks(), Budget(MEMORY), max_epochs=1)
    with pytest.warns(UserWarning, match="Callback.on_after_backward is called.*register_hook"):
        fitted(module_of(), Budget(MEMORY), Callback(), max_epochs=1)


def test_hooks_of_parameters_see_gradients() -> None:
    seen: list[float] = []
    module = module_of()
    module.model.ln.weight.register_hook(lambda grad: seen.append(float(grad.norm())))
    fitted(module, Budget(MEMORY), max_epochs=1)
    assert len(seen) >= 6


def test_an_example_input_is_ignored_with_a_warning() -> None:
    module = module_of()
    module.example_input_array = torch.zeros(1, 16, dtype=torch.long)
    with pytest.warns(UserWarning, match="example_input_array is ignored"):
        fitted(module, Budget(MEMORY), max_epochs=1, enable_model_summary=True)


def test_the_model_cannot_be_called_outside_of_the_engine() -> None:
    trainer, _ = fitted(module_of(), Budget(MEMORY), max_epochs=1)
    module = trainer.lightning_module
    tokens = torch.zeros(1, 16, dtype=torch.long)
    with pytest.raises(RunError, match=r"engine\.evaluate"):
        module(tokens)
    assert trainer.strategy.engine.evaluate(module, tokens).shape == (1, 16, 64)
    with pytest.raises(RunError, match=r"engine\.state_dict"):
        module.state_dict()


def test_settings_that_change_during_training() -> None:
    class Changes(pl.Callback):
        def __init__(self, name: str, value: Any) -> None:
            self.name, self.value = name, value

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                setattr(trainer, self.name, self.value)

    for name, value in (("accumulate_grad_batches", 3), ("gradient_clip_val", 0.1)):
        with pytest.raises(RunError, match=f"{name}.*the engine was built for"):
            fitted(module_of(), Budget(MEMORY), Changes(name, value), max_epochs=1)


def test_one_module_has_one_engine() -> None:
    module = module_of()
    trainer, _ = fitted(module, Budget(MEMORY), max_epochs=1)
    other = trainer_of(Budget(MEMORY))
    other.validate(module, loader(8), verbose=False)
    assert other.strategy.engine is trainer.strategy.engine
    with pytest.raises(RunError, match="memory='2MiB', and this Budget has '4MiB'"):
        trainer_of(Budget("4MiB")).validate(module, loader(8), verbose=False)


def test_sparse_accumulates_nothing() -> None:
    sparse = Sparse(density=1.0)
    with pytest.raises(RunError, match=r"accumulate_grad_batches=2. with Sparse"):
        fitted(module_of(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True)), Budget(MEMORY, exchange=sparse),
               accumulate_grad_batches=2)  # fmt: skip
    trainer, seen = fitted(
        module_of(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True)), Budget(MEMORY, exchange=sparse), max_epochs=1
    )
    assert seen.losses[-1] < seen.losses[0]
    assert trainer.global_step == trainer.strategy.engine.optimizer.steps == 6
    assert adamw


class Saves(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint("never.ckpt")


def test_nothing_reads_the_weights_between_micro_batches() -> None:
    """The engine's sums of gradients may have the place of weights then."""
    with pytest.raises(RunError, match=r"val_check_interval=0.5.*after 3 batches.*accumulate_grad_batches=2"):
        fitted(module_of(), Budget(MEMORY), accumulate_grad_batches=2, val_check_interval=0.5)
    with pytest.raises(RunError, match=r"1 of 2 batches of a step.*accumulate_grad_batches"):
        fitted(module_of(), Budget(MEMORY), Saves(), accumulate_grad_batches=2)
