"""What a LightningModule or a Trainer may do that has no effect under `Budget`, or another one: it raises, or warns."""

from __future__ import annotations

from inspect import signature
from typing import Any

from scrimp._warnings import warn
from scrimp.errors import RunError
from scrimp.ext.lightning._package_private import changes_layers

GRADIENTS = (
    "read trainer.strategy.engine.optimizer.norm in on_train_batch_end, or call parameter.register_hook in setup, whose hooks "
    "see every gradient"
)
HOOKS = {  # in which plain Lightning has gradients
    "on_after_backward": GRADIENTS,
    "on_before_optimizer_step": GRADIENTS,
    "optimizer_zero_grad": "the engine clears gradients itself after each update",
}
REPLACED = {  # methods of a LightningModule that the engine does not call
    "backward": "the engine runs backward; scale the loss in training_step, or use parameter.register_hook",
    "configure_gradient_clipping": "the engine clips by the norm of all gradients: give Trainer(gradient_clip_val=...)",
}
CALLBACKS = {  # by their classes: why not, and what then
    "GradientAccumulationScheduler": "the engine is built for one number: use Trainer(accumulate_grad_batches=...)",
    "StochasticWeightAveraging": "the weights live in the engine and cannot be copied: average checkpoints after training",
    "WeightAveraging": "the weights live in the engine and cannot be copied: average checkpoints after training",
    "BaseFinetuning": "the engine lays out memory by requires_grad: freeze before fit, and unfreeze in another run",
    "ModelPruning": "the weights live in the engine, and pruning replaces them: prune after training",
}
MANUAL = (
    "Budget is for automatic optimisation. With automatic_optimization=False the LightningModule holds a scrimp.Engine and "
    "steps it itself: docs/howto/lightning.md shows how"
)


def check_module(module: Any, base: type) -> None:
    """Before an engine adopts the module for training. `base`: Lightning's own class."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise RunError(f"{name}: {MANUAL}")
    for method, remedy in REPLACED.items():
        if _has_own(module, method, base):
            raise RunError(f"{name}.{method} would not be called under Budget: {remedy}")
    if "dataloader_iter" in signature(module.training_step).parameters:
        raise RunError(
            f"{name}.training_step takes dataloader_iter: the engine repeats a step that does not fit, and it would get another "
            "batch; take (batch, batch_idx)"
        )
    _warn_of_gradient_hooks(module, base)


def check_trainer(trainer: Any, base: type) -> None:
    """`base`: Lightning's class of callbacks."""
    if changes_layers(trainer.strategy) is not None:
        raise RunError(
            "Trainer(sync_batchnorm=True) is not possible with Budget: statistics are those of a rank's own batch, and rank 0's "
            "running ones count; leave it out, or use GroupNorm"
        )
    for callback in trainer.callbacks:
        for known in type(callback).__mro__:
            if known.__name__ in CALLBACKS and known.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
                raise RunError(f"the callback {type(callback).__name__} is not possible with Budget: {CALLBACKS[known.__name__]}")
        _warn_of_gradient_hooks(callback, base)


def check_validation(trainer: Any) -> None:
    """When training starts: between two batches of one step the engine cannot run the model."""
    every, of = trainer.val_check_batch, trainer.accumulate_grad_batches
    if isinstance(every, int) and trainer.enable_validation and every % of and every < trainer.num_training_batches:
        raise RunError(
            f"Trainer(val_check_interval={trainer.val_check_interval!r}) validates after {every} batches, in the middle of a "
            f"step of accumulate_grad_batches={of}: let it be a multiple"
        )


def check_example(module: Any) -> None:
    """Lightning's summary would run the model on `example_input_array` outside of the engine."""
    if getattr(module, "example_input_array", None) is not None:
        warn(
            f"{type(module).__name__}.example_input_array is ignored: Lightning would run the model on it outside of a step, and "
            "the weights are in the engine then; set it to None"
        )
        module.example_input_array = None


def _warn_of_gradient_hooks(owner: Any, base: type) -> None:
    for hook, remedy in HOOKS.items():
        if _has_own(owner, hook, base):
            warn(
                f"{type(owner).__name__}.{hook} is called, but parameters have no gradients in it: the engine has them, layer by "
                f"layer; {remedy}"
            )


def _has_own(owner: Any, method: str, base: type) -> bool:
    """Whether a method is not Lightning's own, which does nothing or what the engine does."""
    found = getattr(owner, method, None)
    if found is None:
        return False
    function = getattr(found, "__func__", found)
    where = str(getattr(function, "__module__", ""))
    return function is not getattr(base, method, None) and where.partition(".")[0] not in ("lightning", "pytorch_lightning")
