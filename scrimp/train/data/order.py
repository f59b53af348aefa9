"""The order of samples: a pure function of the seed and the number of a sample in the run.

In epoch e the samples are permuted. The permutation is a Feistel network on the smallest even number of bits that holds all
samples; a result beyond the last sample is permuted again (cycle walking). So any sample is found without the others, in no
memory, and the same on every machine. A restart at a step and another number of ranks change nothing.

    round r:  (left, right) -> (right, left xor H(seed, epoch, r, right))
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Order:
    """Of `samples` samples. `at(k)` is the sample that has the number k in the run."""

    samples: int
    seed: int

    def at(self, number: int) -> int:
        epoch, place = divmod(number, self.samples)
        half = max(1, ((self.samples - 1).bit_length() + 1) // 2)
        keyed = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=8).copy
        while True:
            place = _mixed(place, half, keyed)
            if place < self.samples:
                return place

    def step(self, step: int, batch: int) -> list[int]:
        """The samples of a step."""
        return [self.at(number) for number in range(step * batch, (step + 1) * batch)]


def _mixed(place: int, half: int, keyed: Callable[[], hashlib.blake2b]) -> int:
    mask = (1 << half) - 1
    left, right = place >> half, place & mask
    for number in range(ROUNDS):
        digest = keyed()
        digest.update(b"%d %d" % (number, right))
        left, right = right, left ^ (int.from_bytes(digest.digest(), "big") & mask)
    return left << half | right
