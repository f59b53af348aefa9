"""`Budget`, a Strategy of Lightning.

    Trainer                       Budget                       Engine
    fit: setup                    translate, adopt             Engine(module, ...)
    closure: training_step        run within the budget        backward(*batch)       forward and backward at once
             backward             only Lightning's hooks
    optimizer.step                hooks, then the update       update()
    validation_step, predict_step                              evaluate(fn, *batch)
    save_checkpoint, ckpt_path                                 save(folder), load(folder)

Lightning and its schedulers keep the torch optimizer of `configure_optimizers`. It never gets a gradient; the engine copies its
settings before each update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from scrimp.engine import Engine, Memory
from scrimp.errors import CheckpointError, RunError
from scrimp.exchange import Dense, Sparse
from scrimp.ext.lightning import _checks as checks
from scrimp.ext.lightning import _ranks as ranks
from scrimp.ext.lightning._adopted import Adopted, adopted
from scrimp.ext.lightning._files import FULL, Weights, lightning_state, save_full
from scrimp.ext.lightning._package_private import only_gradients, package
from scrimp.ext.lightning._settings import clip_of, fit_of, load_groups, precision_of, saved_groups
from scrimp.ext.lightning._step import Call, NoLoss, draw_on, needs_loss, with_loss
from scrimp.ext.optim import copy_settings, optimizer_of
from scrimp.layout import Mesh
from scrimp.planner import Plan

pl = package()


class BudgetPrecision(pl.plugins.Precision):  # type: ignore[misc,name-defined]
    """In place of Lightning's plugin: the engine casts, scales the loss and clips."""

    def __init__(self, precision: str, clips: Callable[[float | None], None]) -> None:
        self.precision = precision
        self._clips = clips

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = None) -> None:
        self._clips(clip_val)


class Budget(pl.strategies.ParallelStrategy):  # type: ignore[misc,name-defined]
    """Lightning's Trainer within a memory budget: `Trainer(strategy=Budget(memory="24GiB"))`, with the LightningModule unchanged.

    Losses, weights and logs are those of plain Lightning with `fused=True` in the optimizer. `trainer.strategy.engine` is the
    engine, with its ledger. With several ranks start the script with torchrun.

    Arguments:
        memory: A `Memory(device=..., host=..., disk=...)`, or a size of the device such as "24GiB".
        plan: Not possible: a plan's program would run in place of `training_step`.
        exchange: How gradients travel between ranks: `Dense()`, or `Sparse(...)`.
        mesh: The ranks as a mesh, as in Engine.
        activations: What the engine may do with activations, as in Engine.
        precision: "fp32", "bf16" or "fp16", with fp32 master weights. The default follows Trainer(precision=...).
        weights: Values for a module on meta: a state dict, a .safetensors file, or a Hugging Face folder.
        skip_nonfinite: Skip the update, with a warning, if a gradient is not finite.
        cast_inputs: Cast floating-point tensors of a batch to the precision of the weights.
    """

    strategy_name = "budget"

    def __init__(
        self,
        memory: Memory | int | str | None = None,
        *,
        plan: Plan | None = None,
        exchange: Dense | Sparse | None = None,
        mesh: Mesh | str | None = None,
        activations: str | Iterable[str] = "auto",
        precision: str | None = None,
        weights: Any = None,
        skip_nonfinite: bool = True,
        cast_inputs: bool = True,
    ) -> None:
        if plan is not None:
            raise RunError(
                "Budget(plan=...) is not possible: the plan's program would run in place of training_step, without its logs and "
                "its other code; train with scrimp.Engine(model, plan=plan)"
            )
        self._settings: dict[str, Any] = {
            "memory": memory, "exchange": exchange, "mesh": mesh, "activations": activations,
            "skip_nonfinite": skip_nonfinite, "cast_inputs": cast_inputs,
        }  # fmt: skip
        self._weights, self._chosen = weights, precision
        self._ranks, self._nodes = ranks.Ranks(), 1
        self._adopted: Adopted | None = None
        self._loaded = False  # a checkpoint, in this fit
        self._pending = 0  # batches whose gradients wait for an update
        self._fitting = False
        self._plugin: Any = None
        super().__init__()

    @property
    def engine(self) -> Engine:
        """The engine that has the weights, from `trainer.fit` (or validate, test, predict) on, also afterwards."""
        mine: Adopted = self._mine
        return mine.engine

    @property
    def _mine(self) -> Adopted:
        if self._adopted is None:
            raise RunError("there is no engine yet: trainer.fit, validate, test or predict makes it")
        return self._adopted

    # What the Trainer sets when it is made.

    @property
    def precision_plugin(self) -> Any:
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        given = pl.plugins.Precision() if plugin is None else plugin
        self._settings["precision"] = precision_of(given, self._chosen)
        self._plugin = BudgetPrecision(given.precision, self._check_clipping)

    def set_world_ranks(self) -> None:
        self._ranks = ranks.Ranks.here()
        self._ranks.check_devices(len(self.parallel_devices or ()), self._nodes)
        pl.utilities.rank_zero_only.rank = self._ranks.rank

    @property
    def num_nodes(self) -> int:
        return self._nodes

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        self._nodes = nodes

    # The ranks.

    @property
    def root_device(self) -> torch.device:
        devices: list[torch.device] = self.parallel_devices
        return devices[self._ranks.local if len(devices) > 1 else 0]

    @property
    def global_rank(self) -> int:
        return self._ranks.rank

    @property
    def local_rank(self) -> int:
        return self._ranks.local

    @property
    def world_size(self) -> int:
        return self._ranks.world

    @property
    def is_distributed(self) -> bool:
        return self._ranks.world > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self._ranks.world, "rank": self._ranks.rank}

    def barrier(self, name: str | None = None) -> None:
        ranks.wait(self._ranks.world)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return ranks.from_rank(obj, self._ranks.world, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return ranks.reduced(tensor, self._ranks.world, group, reduce_op)

    # Before the first batch.

    def setup_environment(self) -> None:
        super().setup_environment()
        ranks.join(self.root_device, self._ranks.world)

    def model_to_device(self) -> None:
        """The engine brings layers to the device when they run."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """For `trainer.init_module()`: on the host; on meta if the weights come from elsewhere."""
        with torch.device("meta" if empty_init else "cpu"):
            yield

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        self._fitting = trainer.state.fn.value == "fit"
        self._loaded = False
        self.accelerator.setup(trainer)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            only_gradients(loop)
        checks.check_trainer(trainer, pl.Callback)
        checks.check_example(module)
        if trainer.state.fn.value == "predict" and self._ranks.world > 1:
            raise RunError(
                f"trainer.predict on {self._ranks.world} ranks is not possible with Budget: ranks get different numbers of "
                "batches, and must run the same layers together; use one rank, or trainer.test, whose sampler repeats batches"
            )
        fit, optimizer = None, None
        if self._fitting:
            checks.check_module(module, pl.LightningModule)
            fit = fit_of(trainer)
            self.setup_optimizers(trainer)
            optimizer = optimizer_of(self.optimizers[0], module.named_parameters())
        self._adopted = adopted(module, self._settings, fit, device=self.root_device, weights=self._weights, optimizer=optimizer)
        self._pending = 0

    def on_train_start(self) -> None:
        if self.engine.optimizer.steps and not self._loaded:
            raise RunError(
                "this LightningModule was trained before, and its engine still has the optimizer's states, where plain Lightning "
                "would begin with new ones: go on from a checkpoint, trainer.fit(..., ckpt_path=...), or use a new module"
            )
        checks.check_validation(self.lightning_module.trainer)

    # One batch.

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        mine, module = self._mine, self.lightning_module
        now = module.trainer.accumulate_grad_batches
        if mine.fit is None or mine.fit.micro_batches != now:
            raise RunError(f"accumulate_grad_batches changed to {now} during training; the engine was built for {mine.fit}")
        call = Call(module, needs_loss(module.training_step, self.root_device), mine.counted, keeps=True)
        run = mine.engine.backward
        if self._at_once:
            copy_settings(self.optimizers[0], mine.engine)
            run = mine.engine.step
        try:
            with call.logging(), mine.method.calling(call):
                loss = run(*args, **kwargs)
        except NoLoss as skipped:
            draw_on(skipped.generators, self.root_device)
            return None
        self._pending += not self._at_once
        return with_loss(call.output, loss)

    @property
    def _at_once(self) -> bool:
        """Sparse ranks exchange during backward, so forward, backward and update are one call."""
        return isinstance(self._settings["exchange"], Sparse)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward has run with the forward: only Lightning's hooks."""
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        done: torch.Tensor = self.precision_plugin.post_backward(loss, self.lightning_module)
        return done

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)  # the optimizer itself finds no gradients
        if self._pending:
            copy_settings(self.optimizers[0], self.engine)
            self._pending = 0
            self.engine.update()
        return result

    def _check_clipping(self, value: float | None) -> None:
        fit = self._adopted.fit if self._adopted is not None else None
        norm = clip_of(self.lightning_module.trainer)
        if fit is not None and (norm != fit.clip_norm or (value or None) != (fit.clip_norm)):
            raise RunError(
                f"gradient_clip_val is {value} now, and the engine was built for {fit.clip_norm}; set it before trainer.fit"
            )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mine, module = self._mine, self.lightning_module
        self._check_whole_step(name)
        training = [each for each in module.modules() if each.training]  # what the user's hooks keep in training mode
        method = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            for each in training:
                each.training = True
            return method(*args, **kwargs)

        call = Call(module, run, mine.counted)
        with call.logging():
            return mine.engine.evaluate(call, *args, **kwargs)

    def _check_whole_step(self, what: str) -> None:
        if self._pending:
            of = self.lightning_module.trainer.accumulate_grad_batches
            raise RunError(
                f"{what} after {self._pending} of {of} batches of a step: the engine holds their gradients, and cannot run or "
                "save the model before the update; call it after a multiple of accumulate_grad_batches"
            )

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # into the engine

    def lightning_module_state_dict(self) -> Weights:
        return Weights(self.engine.state_dict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {"param_groups": saved_groups(optimizer)}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        self._check_whole_step("save_checkpoint")
        if FULL in checkpoint:
            if storage_options is not None:
                raise CheckpointError(f"{filepath}: storage_options={storage_options!r} has no effect on a folder of the engine")
            save_full(self.engine, checkpoint, filepath)
            return
        weights = {**checkpoint["state_dict"]}  # on all ranks: they gather it together
        super().save_checkpoint({**checkpoint, "state_dict": weights}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if not Path(checkpoint_path).is_dir():
            return self._file(checkpoint_path, weights_only)
        if self._mine.fit is None:
            raise CheckpointError(
                f"{checkpoint_path} is a full checkpoint, with optimizer states, which tests and predictions do not need: in "
                "the run that trains call trainer.save_checkpoint(path, weights_only=True), and give that file"
            )
        with torch.random.fork_rng(enabled=not self._fitting):  # the random state too is only for training
            state = lightning_state(self.engine.load(checkpoint_path), checkpoint_path)
        self._loaded = True
        return state

    def _file(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        if self._fitting:
            raise CheckpointError(
                f"trainer.fit(ckpt_path={str(path)!r}): Budget goes on from folders that it wrote, and this is a file, without "
                "the state of an engine. To begin with its weights: load_from_checkpoint, then trainer.fit without ckpt_path"
            )
        more = {} if weights_only is None else {"weights_only": weights_only}  # Lightning 2.5 does not have it
        found: dict[str, Any] = super().load_checkpoint(path, **more)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        weights = checkpoint["state_dict"]
        if isinstance(weights, Weights):
            if weights.changed:
                raise CheckpointError(
                    "on_load_checkpoint changed checkpoint['state_dict'], and the engine has loaded the weights"
                )
            return
        with self.engine.full_parameters() as module:
            module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        load_groups(self.optimizers[0], checkpoint[FULL][0]["param_groups"])

    def teardown(self) -> None:
        """The weights stay in the engine: Lightning would move the module to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
