"""`WithinBudget`: a mixin that makes a trainer train within a memory budget.

The trainer keeps its loop: data, loss, scheduler, logs, evaluation, checkpoints, callbacks. The engine computes gradients and
makes updates.

    training_step      the trainer's own runs inside `engine.backward`, and gives its loss to the engine
    optimizer.step()   of the torch optimizer, which has no gradients: a hook on it calls `engine.update`
    prediction_step    the trainer's own runs inside `engine.evaluate`; so does `model.generate`
    save and load      the trainer's files, and a folder with the engine's state
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scrimp._warnings import warn
from scrimp.engine import Engine, Memory
from scrimp.errors import RunError
from scrimp.exchange import Dense, Sparse
from scrimp.ext.hf import engine_model
from scrimp.ext.hf.retries import Counted
from scrimp.ext.hf.settings import activations_of, check_arguments, precision_of, warn_of_dtype
from scrimp.ext.hf.trainer_private import TrainerHooks
from scrimp.ext.optim import copy_settings, optimizer_of
from scrimp.planner import Plan


class WithinBudget(TrainerHooks):
    """Put it before a trainer: `class SFT(WithinBudget, SFTTrainer): ...`. All arguments are the trainer's, except these:

    Arguments:
        memory: A `Memory(device=..., host=..., disk=...)`, or a size of the device such as "24GiB".
        weights: Values for a model on the meta device: a Hugging Face folder, a .safetensors file, or a state dict.
        exchange: How gradients travel between ranks: `Dense()`, or `Sparse(...)`.
        plan: A `Plan` of this model and of the global batch.
        activations: "auto", or a set of "keep", "recompute" and "offload". Left out, `gradient_checkpointing=True` means
            "recompute", and otherwise it is "auto".
        precision: Of the weights on the device: "bf16", "fp16" or "fp32". Left out, it is that of TrainingArguments.

    `trainer.engine` is the engine. It is built when it is first needed.
    """

    inside = False  # the engine runs something now
    state_to_save: Any = None

    def __init__(
        self,
        *args: Any,
        memory: Memory | int | str | None = None,
        weights: Mapping[str, torch.Tensor] | str | Path | None = None,
        exchange: Dense | Sparse | None = None,
        plan: Plan | None = None,
        activations: str | Iterable[str] | None = None,
        precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._asked: dict[str, Any] = {"memory": memory, "weights": weights, "exchange": exchange, "plan": plan}
        self._activations, self._precision = activations, precision
        self._engine: Engine | None = None
        self._adopted: Callable[[], nn.Module | None] = lambda: None  # the engine's model
        self._hooked: Callable[[], torch.optim.Optimizer | None] = lambda: None  # the optimizer that the engine follows
        self._dtypes: dict[str, torch.dtype] = {}
        self._loss: torch.Tensor | None = None  # that `training_step` has computed, with its graph
        self._norm = torch.zeros(())
        self._waiting = 0  # micro-batches since the last update
        self._skipped = False  # the last update
        super().__init__(*args, **kwargs)

    # Building.

    def check_arguments(self) -> None:
        """Before the trainer makes its accelerator."""
        check_arguments(self.args, precision_of(self.args, self._precision))

    @property
    def engine(self) -> Engine:
        """The engine of the trainer's model."""
        if self._engine is None or self._adopted() is not self.model:
            self.create_optimizer()
        assert self._engine is not None
        return self._engine

    def create_optimizer(self, model: Any = None) -> Any:
        """The trainer's own optimizer, and an engine that makes its updates."""
        if self._engine is not None and self._adopted() is not self.model:  # `model_init` has made another
            self._engine.close()
            self._engine = None
        super().create_optimizer(model)
        shell = self._shell()
        if self._engine is None:
            self._engine = self._build(shell)
            self._adopted = weakref.ref(self.model)
            engine_model.route(self.model, self)
            self._hooked = weakref.ref(shell)
        elif self._hooked() is not shell:
            raise RunError(
                f"trainer.optimizer was replaced by another {type(shell).__name__} after the engine was built, which has the "
                "states of the first; build a new trainer"
            )
        if self.args.gradient_checkpointing and hasattr(self.model, "gradient_checkpointing_disable"):
            self.model.gradient_checkpointing_disable()  # the engine recomputes
        return self.optimizer

    def _build(self, shell: torch.optim.Optimizer) -> Engine:
        args, planned = self.args, self._asked["plan"] is not None
        precision = precision_of(args, self._precision)
        warn_of_dtype(self.model, precision, self._precision)
        self._dtypes = engine_model.dtypes_of(self.model)
        if planned:
            self._check_plan()
        if isinstance(self._asked["exchange"], Sparse) and args.gradient_accumulation_steps > 1:
            raise RunError(
                f"exchange=Sparse with gradient_accumulation_steps={args.gradient_accumulation_steps} is not possible: a rank "
                "selects what it sends in the backward of the last micro-batch; use a larger batch per device, or Dense()"
            )
        engine = Engine(
            self.model,
            **self._asked,
            optimizer=optimizer_of(shell, self.model.named_parameters()),
            precision=precision,
            activations=activations_of(args, "auto" if planned and self._activations is None else self._activations),
            clip_norm=args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None,
            micro_batches=args.gradient_accumulation_steps,
            reduction="mean" if planned else "sum",  # the trainer scales losses itself
            device=args.device,
        )
        ref = weakref.ref(self)

        def update(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            trainer = ref()
            if trainer is not None:
                trainer.update(optimizer)

        shell.register_step_pre_hook(update)
        return engine

    def _shell(self) -> torch.optim.Optimizer:
        """torch's optimizer, without accelerate's wrapper."""
        found: Any = self.optimizer
        while isinstance(getattr(found, "optimizer", None), torch.optim.Optimizer):
            found = found.optimizer
        return found  # type: ignore[no-any-return]

    # Steps.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._check_callbacks()
        out = super().train(*args, **kwargs)
        self.drop_unfinished_step()
        return out

    def _check_callbacks(self) -> None:
        from transformers import TrainerCallback

        for callback in self.callback_handler.callbacks:
            for method in ("on_pre_optimizer_step", "on_optimizer_step"):
                if getattr(type(callback), method) is not getattr(TrainerCallback, method):
                    warn(
                        f"{type(callback).__name__}.{method} finds no gradients on the model: the engine has them. Their norm is "
                        "trainer.engine.optimizer.norm, and parameter.register_hook(...) sees each of them"
                    )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """The trainer's training step inside the engine."""
        engine, own = self.engine, super().training_step
        model.train()
        if self._asked["plan"] is not None:
            return self._at_once(**self._global_batch(inputs))

        def run(inputs: Any) -> torch.Tensor:
            self._loss = None
            own(model, inputs, num_items_in_batch)
            loss, self._loss = self._loss, None
            if loss is None:
                raise RunError(
                    f"{type(self).__name__}.training_step did not call self.accelerator.backward(loss); within a budget that "
                    "call gives the loss to the engine"
                )
            return loss

        if isinstance(self._asked["exchange"], Sparse):
            return self._at_once(run, _plain(inputs))
        with self._busy():
            loss = engine.backward(Counted(self).counting(run), _plain(inputs))
        self._waiting += 1
        return loss

    def _at_once(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Gradients and update in one call, where the engine cannot separate them. Nothing changes the rates in between."""
        copy_settings(self._shell(), self.engine)
        skipped = self.engine.optimizer.skipped
        with self._busy():
            loss = self.engine.step(*(Counted(self).counting(arg) if callable(arg) else arg for arg in args), **kwargs)
        self._skipped = self.engine.optimizer.skipped > skipped
        return loss

    def _check_plan(self) -> None:
        """Raises if the loss is not the one that the plan computes: that of the model, as a mean over the global batch."""
        from transformers import Trainer

        args = self.args
        wrong = {
            "its own training_step": getattr(super().training_step, "__func__", None) is not Trainer.training_step,
            "its own compute_loss": type(self).compute_loss is not Trainer.compute_loss,
            "compute_loss_func": self.compute_loss_func is not None,
            "label_smoothing_factor": self.label_smoother is not None,
            "neftune_noise_alpha": self.neftune_noise_alpha is not None,
            "gradient_accumulation_steps": args.gradient_accumulation_steps > 1,
            "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        }
        found = [name for name, there in wrong.items() if there]
        if found:
            raise RunError(
                f"plan= with {found[0]} is not possible: the engine runs the plan's program, whose loss is the mean that "
                "the model returns for the global batch. Leave out the one or the other"
            )

    def _global_batch(self, inputs: Any) -> dict[str, Any]:
        """The batches of all ranks in one, which a plan takes."""
        return {
            name: self.accelerator.gather(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }

    def take_loss(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """In place of `accelerator.backward`."""
        if not self.inside:
            raise RunError(
                "accelerator.backward was called outside of the engine: put WithinBudget first, class Mine(WithinBudget, "
                f"{type(self).__name__}), so that its training_step runs inside"
            )
        if self._loss is not None:
            raise RunError(
                f"{type(self).__name__}.training_step called accelerator.backward twice; add the losses, and call it once"
            )
        self._loss = loss

    def norm_of_this_step(self) -> torch.Tensor | None:
        """The norm of this step's gradient, before clipping; it has its value once the optimizer has stepped. None if a sparse
        exchange did not need it."""
        self._norm = torch.zeros(())
        return self._norm if self._waiting or self.engine.optimizer.norm is not None else None

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The engine's update, with the settings that the torch optimizer has now."""
        engine = self.engine
        if self._waiting:  # else `_at_once` has made the update
            copy_settings(optimizer, engine)
            skipped = engine.optimizer.skipped
            engine.update()
            self._waiting, self._skipped = 0, engine.optimizer.skipped > skipped
        self._norm.fill_(float("nan") if engine.optimizer.norm is None else engine.optimizer.norm)
        self.step_was_skipped(self._skipped)

    @property
    def dtype(self) -> torch.dtype:
        """In which the model was loaded, and is saved."""
        floating = [dtype for dtype in self._dtypes.values() if dtype.is_floating_point]
        return floating[0] if floating else torch.float32

    def drop_unfinished_step(self) -> None:
        """Discard the gradients of a step that a callback has stopped before its last micro-batch."""
        if self._waiting and self._engine is not None:
            self._engine.zero_grad()
            self._waiting = 0

    # Evaluation.

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's prediction step inside the engine."""
        own = super().prediction_step
        if self.inside:
            return own(model, inputs, *args, **kwargs)

        def run(inputs: Any) -> Any:
            return own(model, inputs, *args, **kwargs)

        return self.run_inside(run, _plain(inputs))

    def run_inside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function that uses the model without gradients, with every module in the mode it is in."""
        if self.control.should_training_stop:
            self.drop_unfinished_step()
        with self._busy():
            return engine_model.evaluate_as_it_is(self.engine, self.model, Counted(self).counting(function), *args, **kwargs)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    # Saving.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the trainer's own; every rank must call it."""
        self.drop_unfinished_step()
        self.state_to_save = self.whole_state()
        try:
            super().save_model(output_dir, _internal_call=_internal_call)
        finally:
            self.state_to_save = None

    def whole_state(self) -> dict[str, torch.Tensor]:
        """What `save_pretrained` writes, on rank 0: each tensor once, in the dtype in which the model was loaded."""
        other = engine_model.aliases(self.model)
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.engine.iter_state(*engine_model.names_to_save(self.model)):
            if name not in other and self.args.should_save:
                state[name] = tensor.to(self._dtypes.get(name, tensor.dtype))
        # The same object under each name of a tied parameter, so that `save_pretrained` sees the tie and writes it once.
        state.update({name: state[first] for name, first in other.items() if first in state})
        return state

    def save_state(self, folder: Path) -> None:
        """The engine's part of a checkpoint: weights, masters, optimizer states, counts."""
        self.engine.save(folder)

    def load_state(self, folder: Path) -> None:
        """Load the engine's part. The trainer loads random states and learning rates itself."""
        device = self.args.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            self.engine.load(folder)
        self._waiting = 0

    def end(self) -> None:
        """As the trainer's own, and free the device."""
        if self._engine is not None:
            self._engine.close()
        super().end()


def _plain(inputs: Any) -> Any:
    """A batch of a tokenizer is a mapping that torch's tree functions do not open."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs
