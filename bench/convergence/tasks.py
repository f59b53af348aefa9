"""What `bench.convergence` trains: a transformer that reads the zoo's grammar letter by letter, and a small ResNet.

The grammar's words are spelt, so that a model has both to spell and to know what follows; as no two words are spelt alike and
a space ends each, a letter's entropy is the grammar's over the mean length of a word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scrimp import zoo
from scrimp.zoo import generator

WORKERS = 4
ROWS = 4  # of a worker's part of a batch
WORDS, LETTERS = 256, 26
SHORTEST, LONGEST = 2, 5
SPACE, STOP, FIRST = 0, 1, 2  # characters; the letters begin at FIRST
SEQ = 32
TRAIN_TOKENS, VALID_ROWS = 400_000, 1024
CLASSES, SIZE = 128, 16
VALID_IMAGES = 2048


class Spelt:
    """The grammar's text as characters."""

    def __init__(self, words: int = WORDS, seed: int = 0) -> None:
        self.grammar = zoo.Grammar(words, seed)
        draw = generator("spelling", words, seed)
        spelt: dict[tuple[int, ...], None] = {(STOP, SPACE): None}  # token 0 ends a sentence
        while len(spelt) < words:
            length = int(torch.randint(SHORTEST, LONGEST + 1, (1,), generator=draw))
            letters = torch.randint(FIRST, FIRST + LETTERS, (length,), generator=draw)
            spelt[(*letters.tolist(), SPACE)] = None
        self.table = torch.full((words, LONGEST + 1), -1)
        for row, word in zip(self.table, spelt, strict=True):
            row[: len(word)] = torch.tensor(word)
        lengths = torch.tensor([len(word) for word in spelt], dtype=torch.float64)
        self.entropy = self.grammar.entropy / float(self.grammar.frequency @ lengths)

    def text(self, tokens: int, seed: int) -> Tensor:
        spelt = self.table[self.grammar.tokens(tokens, seed)]
        return spelt[spelt >= 0]


@dataclass(frozen=True)
class Score:
    """On data never trained on: the mean loss, and the share of right answers."""

    loss: float
    accuracy: float


class TextTask:
    """About 100,000 parameters. Each seed has weights and an order of its own; the text is one and the same."""

    name, title, figure, steps = "text", "A transformer that reads letters", "loss", 2000

    def __init__(self) -> None:
        spelt = Spelt()
        self.floor = spelt.entropy
        self.remark = f"; the text's entropy is {self.floor:.4f} nats a letter"
        self.train = spelt.text(TRAIN_TOKENS, seed=1)
        self.valid = spelt.text(VALID_ROWS * (SEQ + 1), seed=2)[: VALID_ROWS * (SEQ + 1)].view(VALID_ROWS, SEQ + 1)

    def model(self) -> nn.Module:
        return zoo.GPT(zoo.GPTConfig(vocab=FIRST + LETTERS, seq=SEQ, dim=64, heads=4, layers=2))

    def batch(self, draw: torch.Generator, step: int, seed: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.train) - SEQ, (WORKERS * ROWS,), generator=draw)
        rows = self.train[starts[:, None] + torch.arange(SEQ + 1)]
        return rows[:, :-1], rows[:, 1:]

    def score(self, model: nn.Module) -> Score:
        return _score(model, self.valid[:, :-1], self.valid[:, 1:])


class ImagesTask:
    """Stripes of 128 kinds, some of them much alike. Batch norm as DDP has it: each worker normalises with its own part."""

    name, title, figure, steps = "images", "A ResNet that tells stripes", "accuracy", 600
    floor, remark = 0.0, ""

    def __init__(self) -> None:
        self.images = zoo.Images(CLASSES, SIZE)
        self.valid = self.images.batch(VALID_IMAGES, step=-1)

    def model(self) -> nn.Module:
        return zoo.ResNet(zoo.ResNetConfig(block="basic", stages=(1, 1, 1), width=16, stem="small", classes=CLASSES, image=SIZE))

    def batch(self, draw: torch.Generator, step: int, seed: int) -> tuple[Tensor, Tensor]:
        return self.images.batch(WORKERS * ROWS, step=1_000_000 * seed + step)

    def score(self, model: nn.Module) -> Score:
        return _score(model, *self.valid)


Task = TextTask | ImagesTask


@torch.no_grad()
def _score(model: nn.Module, inputs: Tensor, targets: Tensor) -> Score:
    model.eval()
    loss = right = 0.0
    for part, wanted in zip(inputs.split(256), targets.split(256), strict=True):
        logits = model(part).flatten(0, -2).float()
        loss += float(nn.functional.cross_entropy(logits, wanted.flatten(), reduction="sum"))
        right += float((logits.argmax(1) == wanted.flatten()).sum())
    model.train()
    return Score(loss / targets.numel(), right / targets.numel())


TASKS = {task.name: task for task in (TextTask, ImagesTask)}
