"""An oracle of the sparse exchange: each step as the formulas stand, in plain torch and fp64, from what the engine had before it.

Two numbers that are nearly equal may be ranked either way, and one near the middle of two bf16 numbers rounded either way, as
the processor's roundings go. So what was sent is taken from the engine (what was there, less what is left), and is judged by
what the rule promises: so many entries of each row, none smaller than one that stays, and of each no more left than bf16
rounds off. All else is judged by bounds that count roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from scrimp import Engine, zoo
from scrimp.exchange._row_topk import COLUMNS, row_topk
from tests.rank_jobs.sparse import EPS, LR, MOMENTUM, State, _residuals, batch_of, engine_of
from tests.support import bounds

DECAY = 0.1  # of ADAM


def follow(
    name: str, steps: int, density: float, small: int, *, adam: bool, raw: bool, clip: float | None, **others: Any
) -> tuple[State, list[str]]:
    """The weights after some steps, and what was wrong on the way."""
    settings = {"density": density, "small": small, "of": "gradient" if raw else "update"}
    engine = engine_of(name, settings, seed=dist.get_rank(), clip_norm=clip, **others)
    oracle = Oracle(name, density, small, adam=adam, raw=raw, clip=clip)
    state, left = _copied(engine)
    wrong: list[str] = []
    for step in range(steps):
        batch = batch_of(name, step, dist.get_world_size(), dist.get_rank())
        before = (state, left)
        engine.step(*batch)
        engine._run.wait()
        state, left = _copied(engine)
        wrong += [f"step {step}, {said}" for said in oracle.step(step, batch, before, (state, left), engine.optimizer.norm)]
    return state, wrong


def _copied(engine: Engine) -> tuple[State, State]:
    return {key: value.clone() for key, value in engine.iter_state()}, {k: v.clone() for k, v in _residuals(engine).items()}


class Oracle:
    """`group`: the ranks that exchange, `world` of them. `counted`: if ranks hold parts of parameters, whether this rank's part
    counts for the norm."""

    def __init__(
        self, name: str, density: float, small: int, *, adam: bool, raw: bool, clip: float | None, group: Any = None,
        counted: Callable[[str], bool] | None = None,
    ) -> None:  # fmt: skip
        self.model = zoo.build(name)
        self.group, self.world, self.counted = group, dist.get_world_size(group), counted
        self.density, self.small, self.adam, self.raw, self.clip = density, small, adam, raw, clip
        self.lr = LR / 50 if adam else LR
        names = [key for key, _ in self.model.named_parameters()]
        self.rules = {key: bounds.Adam(eps=EPS) if adam else bounds.Momentum(MOMENTUM) for key in names}

    def step(
        self, step: int, batch: list[torch.Tensor], before: tuple[State, State], after: tuple[State, State], norm: float | None
    ) -> list[str]:
        self.model.load_state_dict(before[0])
        self.model.zero_grad()
        self.model(*batch).backward()
        gradients = {key: parameter.grad.flatten().double() for key, parameter in self.model.named_parameters()}  # type: ignore[union-attr]
        return self.judge(step, gradients, before, after, norm)

    def judge(
        self, step: int, gradients: Mapping[str, torch.Tensor], before: tuple[State, State], after: tuple[State, State],
        norm: float | None,
    ) -> list[str]:  # fmt: skip
        """What is wrong with a step in which this rank had these gradients, flat and in fp64."""
        wrong: list[str] = []
        means = {}  # of what all ranks sent: the mean, its error
        for key, gradient in gradients.items():
            if gradient.numel() < self.small:
                values = gradient.bfloat16().double()
                sent, error = values, 0 * values
            else:
                sent, error, said = self._sent(key, gradient, step, before[1][key].double(), after[1][key].double())
                wrong += [f"{key}: {words}" for words in said]
            means[key] = (self._mean(sent), self._mean(error) + bounds.mean_error(self.world, self._mean(sent.abs())))
        scale = 1.0
        if self.clip is not None:
            assert norm is not None
            rates = {key: 1.0 if mean.numel() < self.small else self.lr for key, (mean, _) in means.items()}
            parts = {key: pair for key, pair in means.items() if self.counted is None or self.counted(key)}
            rows, errors = (
                torch.cat([pair[k] / rates[key] for key, pair in parts.items()] or [torch.zeros(0)]) for k in range(2)
            )
            sums = torch.stack([rows.norm() ** 2, errors.norm() ** 2, torch.tensor(float(rows.numel()))]).double()
            if self.counted is not None:
                dist.all_reduce(sums)
            want, limit = float(sums[0].sqrt()), float(bounds.gamma(int(sums[2])) * sums[0].sqrt() + sums[1].sqrt())
            if abs(norm - want) > limit:
                wrong.append(f"the norm is {norm}, not {want} within {limit}")
            scale = min(1.0, self.clip / (norm + 1e-6))
        for key, (mean, error) in means.items():
            update, off = scale * mean, scale * error
            if mean.numel() < self.small or self.raw:
                self.rules[key].add(update, off)
                update, off = self.rules[key].update(self.lr, step + 1)
            kept = before[0][key].double().flatten() * (1 - self.lr * DECAY if self.adam else 1)
            bound = off + bounds.gamma(3 + self.world) * (kept.abs() + update.abs() + off)
            times = bounds.excess(after[0][key].flatten(), kept - update, bound)
            if not times <= 1:
                wrong.append(f"{key}: weights are off by {times:.3g} times their bound")
        return wrong

    def _sent(
        self, key: str, gradient: torch.Tensor, step: int, before: torch.Tensor, left: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        """What this rank sent, its error, and what is wrong with it."""
        rule = self.rules[key]
        added, off = gradient, 0 * gradient
        if not self.raw:
            rule.add(gradient, 0 * gradient)
            added, off = rule.update(self.lr, step + 1)
        whole, error = before + added, off + bounds.gamma(3) * (before.abs() + added.abs())
        chosen = (whole - left).abs() > whole.abs() / 2
        wrong = []
        if (times := bounds.excess(left[~chosen], whole[~chosen], error[~chosen])) > 1:
            wrong.append(f"what stays is off by {times:.3g} times its bound")
        if bool((left.abs() > bounds.U_BF16 * (whole.abs() + error))[chosen].any()):
            wrong.append("more is left of what was sent than bf16 rounds off")
        for start in range(0, whole.numel(), COLUMNS):
            row = slice(start, start + COLUMNS)
            sent, entries = chosen[row], row_topk(whole[row].numel(), self.density).entries
            least = float((whole.abs() + error)[row][sent].min()) if int(sent.sum()) >= entries else 0.0  # then all were sent
            if int(sent.sum()) > entries:
                wrong.append(f"{int(sent.sum())} entries were sent instead of {entries}")
            if float((whole.abs() - error)[row][~sent].max()) > least:
                wrong.append("something stays that is larger than what was sent")
        if not self.raw:
            rule.moment, rule.size, rule.off = (torch.as_tensor(t) * ~chosen for t in (rule.moment, rule.size, rule.off))
        return (whole - left) * chosen, error * chosen, wrong

    def _mean(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total / self.world
