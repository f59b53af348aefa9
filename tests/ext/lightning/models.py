"""A tiny GPT as a LightningModule, its data, and runs of it with and without a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

from scrimp.ext.lightning import Budget

VOCAB, SEQ, DIM, LAYERS = 64, 16, 64, 6
MEMORY = "2MiB"  # of 3.3 MB of weights, gradients and optimizer states


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, seq, 3, 4, DIM // 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / (DIM // 4) ** 0.5
        mixed = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -torch.inf).softmax(-1) @ v
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, seq, DIM)), self.dropout, self.training)
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.ln2(x))))
        return y


class GPT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.ln, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(self.ln(x))
        return y


Configure = Callable[["Tiny"], Any]


def adamw(module: Tiny, **settings: Any) -> torch.optim.Optimizer:
    """Two groups, as they are usual."""
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"lr": 3e-3, "fused": True, **settings})


class Tiny(pl.LightningModule):
    """Without scrimp's names, as a user writes it."""

    def __init__(self, configure: Configure = adamw, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters({"dropout": dropout})
        self.model, self.configure = GPT(dropout), configure

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)
        return logits

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(batch)[:, :-1].reshape(-1, VOCAB), batch[:, 1:].reshape(-1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).argmax(-1)

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Tokens that can be learnt: each is the one before plus a step of its row's own."""
    draw = torch.Generator().manual_seed(seed)
    start, stride = torch.randint(0, VOCAB, (2, count, 1), generator=draw)
    return (start + stride % 5 * torch.arange(SEQ)) % VOCAB


def loader(count: int = 24, batch: int = 4, seed: int = 0) -> DataLoader[torch.Tensor]:
    return DataLoader(rows(count, seed), batch_size=batch)  # type: ignore[arg-type]


@dataclass
class Seen(pl.Callback):
    """What a user sees of a run."""

    losses: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def module_of(*args: Any, **kwargs: Any) -> Tiny:
    torch.manual_seed(0)
    return Tiny(*args, **kwargs)


def trainer_of(budget: Any = None, *callbacks: Any, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    more = {} if budget is None else {"strategy": budget}
    return pl.Trainer(accelerator="cpu", callbacks=[*callbacks], **{**quiet, "max_epochs": 2, **more, **settings})


def weights_of(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """In the names of the LightningModule."""
    if isinstance(trainer.strategy, Budget):
        return trainer.strategy.engine.state_dict()
    assert trainer.lightning_module is not None
    return {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    assert {*got} == {*want}
    return all(torch.equal(got[name], want[name]) for name in want)


def fitted(
    module: Tiny, budget: Budget | None = None, *callbacks: Any, ckpt_path: Any = None, train: Any = None, **settings: Any
) -> tuple[pl.Trainer, Seen]:
    seen = Seen()
    trainer = trainer_of(budget, seen, *callbacks, **settings)
    torch.manual_seed(1)
    trainer.fit(module, train or loader(), loader(8, seed=1), ckpt_path=ckpt_path)
    return trainer, seen
