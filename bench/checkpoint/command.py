"""What a save costs training: seconds that it adds to steps when it runs in the background, and seconds of a save that waits.

    python -m bench.checkpoint [--ranks 2] [--blocks 8] [--dim 1024] [--rounds 5] [--folder FOLDER] [--json FILE]

In each round every rank saves and waits; then saves in the background and steps until that save is complete; then makes as many
steps without one. The difference of the two is what the save added. All ranks are on this machine and share its cores with the
threads that write, so a machine with a free core for each shows less. Apart from that the seconds are counted in which the save
blocked training: those of the call, and those in which updates waited.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench.checkpoint import rank
from bench.machine import machine
from scrimp.ext.ranks import pool

QUICK = {"layers": 2, "dim": 32, "heads": 2, "seq": 16, "vocab": 64}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="Where the checkpoints go. Default: a temporary folder.")
    parser.add_argument("--quick", action="store_true", help="A model that is too small to say anything about time.")
    parser.add_argument("--json")
    arguments = parser.parse_args(given)
    sizes = {"layers": arguments.blocks, "dim": arguments.dim, "heads": 8, "seq": arguments.seq, "vocab": 512}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = pool(arguments.ranks).run(
            rank.measure,
            QUICK if arguments.quick else sizes,
            arguments.batch,
            arguments.precision,
            1 if arguments.quick else arguments.rounds,
            folder,
            timeout_seconds=1800,
        )
    found = {"machine": machine(), "ranks": arguments.ranks, "precision": arguments.precision, "rounds": rows[0]}
    print(words(found))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


def words(found: dict[str, Any]) -> str:
    rounds = found["rounds"]
    first, middle = rounds[0], {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    shares, blocked = (sorted(row[key] for row in rounds) for key in ("share", "blocked_share"))
    return (
        f"{first['parameters'] / 1e6:.0f}M parameters in {found['precision']} on {found['ranks']} ranks, a checkpoint of "
        f"{first['nbytes'] / 1e9:.2f} GB, {len(rounds)} rounds\n"
        f"a save that waits          {middle['save_seconds']:8.3f} s\n"
        f"a save in the background   {middle['added_seconds']:8.3f} s added to {middle['steps']:.0f} steps of "
        f"{middle['steps_alone_seconds'] / middle['steps']:.3f} s; its call took {middle['call_seconds']:.3f} s, updates waited "
        f"{middle['waited_seconds']:.3f} s\n"
        f"share of a save that waits {statistics.median(shares):8.1%} ({shares[0]:.1%} to {shares[-1]:.1%})\n"
        f"of it, training blocked     {statistics.median(blocked):8.1%} ({blocked[0]:.1%} to {blocked[-1]:.1%})"
    )
