"""Ledgers: bytes by kind and tier, now and at the peak.

In:   charges and frees of named kinds.
Out:  totals that add up; the peak, and when it was. Predicted and measured ledgers are the same class.

    _ledger.py  `Ledger` (one tier) and `Books` (all tiers)
    _timeline.py  `Timeline`: the bytes of one step by kind, point by point; `Recording` makes it from charges
    _sizes.py   sizes as people write them: "24 GiB"

Tests of ledger: tests/chunks/meter/test_cpu.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.ledger._ledger import KINDS, Books, Ledger, Snapshot
    from scrimp.ledger._sizes import format_least, format_nbytes, parse_nbytes
    from scrimp.ledger._timeline import Recording, Timeline

__all__ = [
    "KINDS", "Books", "Ledger", "Recording", "Snapshot", "Timeline", "format_least", "format_nbytes", "parse_nbytes",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "KINDS": "scrimp.ledger._ledger",
        "Books": "scrimp.ledger._ledger",
        "Ledger": "scrimp.ledger._ledger",
        "Snapshot": "scrimp.ledger._ledger",
        "format_least": "scrimp.ledger._sizes",
        "format_nbytes": "scrimp.ledger._sizes",
        "parse_nbytes": "scrimp.ledger._sizes",
        "Recording": "scrimp.ledger._timeline",
        "Timeline": "scrimp.ledger._timeline",
    },
)
