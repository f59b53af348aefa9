"""Text from a small stochastic grammar with known entropy, which is the lower bound of a model's loss.

Token 0 ends a sentence. After a word comes token 0 with probability END, else one of BRANCH successors, each with its own
probability; a sentence begins with a successor of token 0. So the text is a first-order Markov source. Its entropy rate is the
mean over a sentence of the entropies of the next token:

    entropy = sum_s visits(s) * H(next | s) / sum_s visits(s)

where visits(s) is the expected number of visits of s in a sentence, beginning at token 0. Sentences are independent of each
other, so many are generated at once: that makes long texts cheap.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from scrimp.zoo.bert import IGNORE

BRANCH = 4
END = 1 / 8
SETTLE = 128  # tokens dropped at the start, so that a text may begin anywhere in a sentence
MASKED_SHARE = 0.15


def generator(*key: object) -> torch.Generator:
    """A generator per key, seeded by the key's text, so that different keys get different seeds."""
    return torch.Generator("cpu").manual_seed(random.Random(" ".join(map(str, key))).getrandbits(63))


class Grammar:
    """`seed` chooses the grammar. Equal arguments give equal text, everywhere and always."""

    def __init__(self, vocab: int = 64, seed: int = 0) -> None:
        words = vocab - 1
        if words < BRANCH:
            raise ValueError(f"a vocabulary of {vocab} is too small: the grammar needs {BRANCH + 1} tokens or more")
        self.vocab = vocab
        self.seed = seed
        with torch.device("cpu"):
            draw = generator("grammar", vocab, seed)
            # Row s of `_next`: token 0, then BRANCH neighbours on a ring of shuffled words. So they differ from each other,
            # and each word follows equally many others.
            ring = 1 + torch.randperm(words, generator=draw)
            place = torch.cat((torch.zeros(1, dtype=torch.long), torch.randperm(words, generator=draw)))
            follow = ring[(place[:, None] + torch.arange(BRANCH)) % words]
            self._next = torch.cat((torch.zeros(vocab, 1, dtype=torch.long), follow), 1)

            weight = -torch.rand(vocab, BRANCH, generator=draw, dtype=torch.float64).clamp(min=1e-3).log()
            end = torch.full((vocab, 1), END, dtype=torch.float64)
            end[0] = 0.0  # a sentence has at least one word
            self._chance = torch.cat((end, (1 - end) * weight / weight.sum(1, keepdim=True)), 1)
            self._below = self._chance.cumsum(1)[:, :-1]

            self.frequency = self._frequency()
            surprise = -torch.special.xlogy(self._chance, self._chance).sum(1)
            self.entropy = float(self.frequency @ surprise)
            self.unigram_entropy = float(-torch.special.xlogy(self.frequency, self.frequency).sum())

    def _frequency(self) -> Tensor:
        """The stationary frequency of each token: visits(s) of a sentence by power iteration, normalised to 1."""
        at = torch.zeros(self.vocab, dtype=torch.float64)
        at[0] = 1.0
        visits = torch.zeros_like(at)
        follow, chance = self._next[:, 1:].flatten(), self._chance[:, 1:]
        while at.sum() > 1e-16:  # the remaining mass shrinks by END at each step
            visits += at
            at = torch.zeros_like(at).index_add_(0, follow, (at[:, None] * chance).flatten())
        return visits / visits.sum()

    def tokens(self, length: int, seed: int = 0) -> Tensor:
        """A text of `length` tokens (int64). A longer text of the same seed begins with the shorter one."""
        return self._text(length, generator("text", self.seed, seed))

    def _text(self, length: int, draw: torch.Generator) -> Tensor:
        with torch.device("cpu"):
            parts: list[Tensor] = []
            count, missing = 256, SETTLE + length
            while missing > 0:
                parts.append(self._sentences(count, draw))
                missing -= len(parts[-1])
                count = min(2 * count, 8192)  # little work for a short text, few rounds for a long one
            return torch.cat(parts)[SETTLE : SETTLE + length].clone()

    def _sentences(self, count: int, draw: torch.Generator) -> Tensor:
        """`count` sentences in sequence. All grow by a token at a time, until the last has ended."""
        at = torch.zeros(count, dtype=torch.long)
        going = torch.ones(count, dtype=torch.bool)
        columns: list[Tensor] = []
        while going.any():
            luck = torch.rand(count, 1, generator=draw, dtype=torch.float64)
            at = self._next[at, (luck >= self._below[at]).sum(1)]
            columns.append(torch.where(going, at, -1))
            going &= at != 0
        table = torch.stack(columns, 1)
        return table[table >= 0]

    def batch(self, batch: int, seq: int, step: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and, one token later, targets. The first rows of a larger batch are the smaller one."""
        rows = self._text(batch * (seq + 1), generator("batch", self.seed, step)).view(batch, seq + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def masked(self, batch: int, seq: int, step: int = 0, *, mask: int) -> tuple[Tensor, Tensor]:
        """For masked models: of the tokens to be restored 80 % read `mask`, 10 % a random token, 10 % themselves.

        Every row has equally many, so that the mean of the losses of parts of a batch is the loss of the batch.
        """
        tokens, _ = self.batch(batch, seq, step)
        with torch.device("cpu"):
            luck = torch.rand(batch, 3, seq, generator=generator("mask", self.seed, step))
            hidden = luck[:, 0].argsort(1).argsort(1) < max(1, round(MASKED_SHARE * seq))
            other = (luck[:, 2] * self.vocab).long()
            shown = torch.where(luck[:, 1] < 0.8, mask, torch.where(luck[:, 1] < 0.9, other, tokens))
            return torch.where(hidden, shown, tokens), torch.where(hidden, tokens, IGNORE)
