"""`Engine`, the class that users call. `_training.py` does the work and holds everything that a step needs.

engine = Engine(model, memory="24GiB")
for batch in loader:
    loss = engine.step(*batch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from scrimp._arguments import renamed
from scrimp.chunks import Optimizer
from scrimp.engine._training import Training
from scrimp.engine.entry.optimizer_handle import Handle
from scrimp.engine.lowered.batch import BatchPart
from scrimp.engine.observe.bound import Bound
from scrimp.engine.setup.adopt import DEFAULT_CHUNK
from scrimp.engine.setup.budget import Memory
from scrimp.engine.setup.process_groups import Group
from scrimp.engine.setup.weight_sources import Source
from scrimp.errors import RunError
from scrimp.exchange import Dense, Sparse
from scrimp.layout import Mesh
from scrimp.ledger import Books
from scrimp.planner import Plan

if TYPE_CHECKING:
    from scrimp.engine.lowered.dtensors import DTensors


class Engine:
    """Trains any eager PyTorch model within a memory budget, with the numbers of plain PyTorch.

    The engine adopts the model: parameters, gradients and optimizer states live in the engine, on device, host or disk, and the
    engine brings each layer to the device when it runs.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> model = zoo.build("gpt-tiny")
    >>> engine = scrimp.Engine(model, memory="1GiB", optimizer=scrimp.AdamW(lr=1e-3), device="cpu")
    >>> loss = engine.step(*zoo.example_batch("gpt-tiny", batch=8, step=0))
    >>> engine.close()

    Arguments:
        model: Any module whose forward returns a scalar loss, or an output with a `loss`. It may be on the meta device.
        weights: Values for the model: a state dict, a .safetensors file, a Hugging Face folder, or a folder of
            torch.distributed.checkpoint.
        plan: A `Plan` of this model, made by `scrimp.plan` or `Plan.load`: every rank runs its part of every operator as the plan
            says. `step` then takes the global batch, or this rank's part of it (`batch_part`).
        optimizer: `AdamW(...)`, `SGD(...)`, "adamw" or "sgd".
        memory: A `Memory(device=..., host=..., disk=...)`, or a size of the device such as "24GiB".
        precision: Of the weights on the device: "bf16", "fp16" or "fp32". Master weights are fp32.
        exchange: How gradients travel between ranks: `Dense()`, or `Sparse(...)`, top-k with error feedback.
        mesh: The ranks as a mesh, such as "node=2,gpu=4": `Sparse` then works over the first axis, and the ranks of the
            second axis shard the model data.
        clip_norm: The largest norm of the global gradient.
        skip_nonfinite: Skip the update, with a warning, if a gradient is not finite.
        micro_batches: Parts that `step` splits a batch into; their gradients are accumulated.
        reduction: How the losses and gradients of micro-batches are combined: "mean", or "sum" if your losses are already scaled
            (by the tokens of all micro-batches, say).
        activations: What the engine may do with activations: "auto", or a set of "keep", "recompute" and "offload" (the
            inputs of recomputed layers go to the host).
        loss: Makes the loss from what the model returns, if that has none.
        cast_inputs: Cast floating-point tensors of a batch to the precision of the weights.
        device: "cuda", "cuda:1" or "cpu". The default is this rank's GPU if there is one.
        chunk_numel: Elements of a chunk, the unit in which model data is sharded.
        group: The ranks that train: their numbers in the default process group, or a process group; None for all of them. Every
            rank of the default group builds the Engine. One that is not in the training group holds nothing, until `resize`
            brings it in.
    """

    @renamed(
        "scrimp.Engine",
        RunError,
        accumulate="micro_batches=4",
        recompute="activations='auto', 'keep' (was 'none') or 'recompute,offload' (was 'all')",
    )
    def __init__(
        self,
        model: nn.Module,
        *,
        weights: Source | None = None,
        plan: Plan | None = None,
        optimizer: Optimizer | str | None = None,
        memory: Memory | int | str | None = None,
        precision: str = "bf16",
        exchange: Dense | Sparse | None = None,
        mesh: Mesh | str | None = None,
        clip_norm: float | None = None,
        skip_nonfinite: bool = True,
        micro_batches: int = 1,
        reduction: str = "mean",
        activations: str | Iterable[str] = "auto",
        loss: Callable[[Any], torch.Tensor] | None = None,
        cast_inputs: bool = True,
        device: str | torch.device | None = None,
        chunk_numel: int = DEFAULT_CHUNK,
        group: Group = None,
    ) -> None:
        self._run = Training(
            model,
            weights=weights,
            plan=plan,
            optimizer=optimizer,
            memory=memory,
            precision=precision,
            exchange=exchange,
            mesh=mesh,
            clip_norm=clip_norm,
            skip_nonfinite=skip_nonfinite,
            micro_batches=micro_batches,
            reduction=reduction,
            activations=activations,
            loss=loss,
            cast_inputs=cast_inputs,
            device=device,
            chunk_numel=chunk_numel,
            group=group,
        )

    # Training.

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on this rank's whole batch, and return the mean loss, detached.

        `engine.step(*batch)` calls the model. `engine.step(fn, *args, **kwargs)` calls `fn` in its place, as `backward` does; its
        tensors are the batch, which is split into micro-batches.

        Modules run in the modes they are in. A step that fails before its update leaves everything as it was. A step that fails
        in its update leaves an engine that can only load a checkpoint.
        """
        return self._run.step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Add the gradients of one micro-batch to those since the last `update`, and return its loss, detached.

        This is gradient accumulation as in a plain loop with `(loss / micro_batches).backward()`: N calls and an `update` are
        one `step` of Engine(micro_batches=N) with the N micro-batches as its batch. Up to `micro_batches` calls may come before
        an update; after fewer the sum is still divided by `micro_batches`. With `reduction="sum"` losses are not divided, and
        any number of calls is possible if `micro_batches` is 2 or more.

        `engine.backward(fn, *args, **kwargs)` calls `fn`, which uses the model in any way and returns a loss, with tensors on the
        device: a training step of another library, or a loss with several forwards. `fn` must not call `loss.backward()`. The
        engine calls `fn` again if the first call did not fit, with the random state and the buffers of the first call.

        A call that fails before its first gradient is as if it had not been made. A call that fails later loses the gradients
        since the last update, and no weight has changed.
        """
        return self._run.backward(*args, **kwargs)

    def update(self) -> None:
        """Update with the gradients of all calls of `backward` since the last update: checked and clipped as in a step."""
        self._run.update()

    def zero_grad(self) -> None:
        """Discard the gradients of all calls of `backward` since the last update."""
        self._run.zero_grad()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward without gradients, in eval mode, within the budget.

        `engine.evaluate(*batch)` calls the model. `engine.evaluate(fn, *args, **kwargs)` calls `fn`, which may use the model in
        any way, with tensors on the device: `engine.evaluate(model.generate, ids, max_new_tokens=20)`. The engine may call `fn`
        a second time if the first call did not fit. All ranks must run the same layers in the same order (`synced_gpus=True`
        for generate).
        """
        return self._run.evaluate(*args, **kwargs)

    @property
    def batch_part(self) -> dict[str, BatchPart]:
        """Under a plan: the part of each tensor of the batch that this rank takes, so that a loader reads no more."""
        return self._run.under_plan.batch

    @property
    def lr(self) -> float | list[float]:
        """The learning rate of the next update; with several groups a list, in the order of `engine.optimizer.param_groups`.

        Setting it sets all groups, to one number or each to its own. An update that was submitted keeps the rate it had.
        """
        return self._run.lr

    @lr.setter
    def lr(self, values: float | Sequence[float]) -> None:
        self._run.lr = values

    @property
    def optimizer(self) -> Handle:
        """What torch's learning-rate schedulers take for an optimizer; also `steps`, `skipped` and the last gradient's `norm`."""
        return self._run.optimizer

    # State.

    def full_parameters(self, *names: str) -> AbstractContextManager[nn.Module]:
        """`with engine.full_parameters() as model:` puts fp32 master weights into the model, on the host, to read and to edit.

        At the end of the block the engine writes what changed to master and weight. `names` are patterns such as "head.*"; other
        parameters stay out. With several ranks every rank enters the block and makes the same edits.
        """
        return self._run.full_parameters(*names)

    def state_dict(self, *names: str) -> dict[str, torch.Tensor]:
        """All parameters in fp32 and all buffers, on the CPU; with several ranks on rank 0, and nothing on the others.

        `names`: only these. They are names, or patterns such as "head.*".
        """
        return self._run.state_dict(*names)

    def iter_state(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in fp32 by every name it has, then every buffer; every rank gets all of them, one at a time.

        `names`: only these, as in `state_dict`; of a tied parameter give one name to get it once.
        """
        return self._run.iter_state(*names)

    def dtensors(self) -> DTensors:
        """Under a plan: every parameter as a `torch.distributed.tensor.DTensor`, by every name it has, for your own tools.

        They are copies in fp32, as in `state_dict`, on a `DeviceMesh` with the plan's axes. Each is split as operators use it;
        ranks gather only what is sharded further between steps. DTensor cannot express a split of an inner factor of a dim
        (`[(-)(x),-]`), nor axes in another order than the mesh's: such a dim is replicated. `.placements` says so.
        """
        return self._run.dtensors()

    def save(self, folder: str | Path, *, wait: bool = True, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint: weights, master weights, optimizer states, step, random state and the settings of all groups.

        The folder appears complete or not at all. `extra` is yours: JSON that the manifest keeps and `load` returns, such as the
        position in the data or `scheduler.state_dict()`. With several ranks it is that of rank 0.

        With `wait=False` a thread writes the state of this call while training goes on; `close` and the next `save` wait for it.
        A layer is copied before its next update, in host memory that `Memory(host=...)` leaves; where it leaves none, the update
        waits until the layer is written. If the save fails, the next call raises, does nothing else, and may be made again.
        """
        self._run.save(folder, extra, wait)

    def load(self, folder: str | Path) -> Mapping[str, Any]:
        """Go on from a checkpoint, whatever budget, chunk size and number of ranks it was written with. Returns the `extra` of
        `save`; empty if there was none.

        Learning rates are those of the checkpoint, as with `load_state_dict` of torch's optimizers, unless `lr` is a function;
        set `engine.lr` afterwards for others.
        """
        return self._run.load(folder)

    def resize(self, group: Group) -> None:
        """Go on training with other ranks, without a checkpoint: fewer, or more, or others.

        `group`: ranks of the default process group, such as `[0, 1]`, or a process group, or None for all ranks. All ranks of the
        default group call it, with the same group: those that train, those that will, and the rest. A rank that leaves holds
        nothing afterwards; it may call nothing but `resize` and `close`. A rank that joins has an Engine of the same arguments:
        one with a `group` that the rank is not in, or one that the rank has left.

        Weights, masters, optimizer states, counters and settings are as after a checkpoint's `save` and `load`, to the bit. Ranks
        that stay keep their random state. A rank never holds more than the larger of its old and new share of the model data,
        its smaller share of the largest tensor of a layer, and one chunk.
        """
        self._run.resize(group)

    # What a step takes.

    @property
    def ledger(self) -> Books:
        """Bytes by kind on device, host and disk: now and at the peak."""
        return self._run.ledger

    def bound(self) -> Bound:
        """The least traffic and time of a step like the last one, and what it took. The first call measures the machine."""
        return self._run.bound()

    def report(self, path: str | Path, *, rehearsal: str | Path | Mapping[str, Any] | None = None) -> None:
        """Write what is known of this run as one HTML file: the plan, memory over the last recorded step, residency, traffic and
        time against the bound, the machine. With `Progress(run=...)` it has the loss and the other metrics too.

        `rehearsal`: a rehearsal's JSON, whose timeline is shown as the prediction. Rank 0 writes; other ranks do nothing.
        """
        self._run.report(path, rehearsal)

    def close(self) -> None:
        """End training: free the device, lift the cap on the allocator and end the engine's threads.

        The host keeps the state, as far as there is room for it; it can still be read and saved. Gradients of `backward` that
        wait for an update are discarded. A second call does nothing.
        """
        self._run.close()

    def __enter__(self) -> Engine:
        self._run.check_open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
