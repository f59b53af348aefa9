"""Rows of `make bench-network`: one for each contender, rate and round; what the counters must show; and the tables.

A row is {"contender", "case", "round", "commit", "machine", "when", "others"} and what `row_of` made of the ranks' words, with
"failed" or "skipped" where there are none. "others" is the share of the cores that they had meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import prod
from statistics import fmean, median
from typing import Any

from bench.gpu.results import SAME_MACHINE, Row
from bench.network.case import Case
from bench.network.contenders import CONTENDERS, FP32
from bench.network.netns import BURST, Bytes

LEAST, MOST, SLACK = 0.98, 1.08, 16 << 10  # of what theory says a step sends; acknowledgements and headers come on top
SMOOTH = 5  # steps over which a loss is averaged before it is compared with the target
LINE = "plain socket"
COLUMNS = ["contender", "ms/step", "spread", "times as fast", "MB sent", "of theory", "last loss", "s to the loss"]
COLUMNS += ["times as fast", "rate of learning", "resident"]


def key_of(contender: str, case: Case, turn: int) -> str:
    return f"{contender} | {turn} | {json.dumps(asdict(case), sort_keys=True)}"


def usable(rows: Sequence[Row], commit: str, machine: Mapping[str, str]) -> dict[str, Row]:
    """Those of this commit from such a machine; what was skipped or failed may be possible by now."""
    found = {}
    for row in rows:
        same = [row["machine"].get(name) for name in SAME_MACHINE] == [machine.get(name) for name in SAME_MACHINE]
        if same and row["commit"] == commit != "unknown" and not {"skipped", "failed"} & {*row}:
            found[key_of(row["contender"], Case(**row["case"]), row["round"])] = row
    return found


def row_of(said: Sequence[Mapping[str, Any]], case: Case, contender: str, outside: Sequence[Bytes]) -> Row:
    """From what the ranks printed and what the interfaces counted meanwhile. A step ends when its last rank has ended it."""
    ends = [max(each) for each in zip(*(one["ends"] for one in said), strict=True)]
    start, began = (min(one[name] for one in said) for name in ("start", "began"))
    timed = [began, *ends[case.warm_up :]]
    row: Row = {
        "seconds": [after - before for before, after in pairwise(timed)],
        "ends": [end - start for end in ends],
        "losses": [fmean(each) for each in zip(*(one["losses"] for one in said), strict=True)],
        "sent": [one["sent"] for one in said],
        "received": [one["received"] for one in said],
        "theory": theory(case) * (len(timed) - 1) if (theory := CONTENDERS[contender].nbytes) is not None else None,
        "resident_nbytes": [one["resident_nbytes"] for one in said],
        "replicas": len({one["checksum"] for one in said}),
        "outside": [asdict(one) for one in outside],
    }
    return {**row, "wrong": wrong(row, case)}


def wrong(row: Row, case: Case) -> list[str]:
    """What cannot be, by theory; nothing in a run that is in order."""
    found = []
    steps, window = len(row["seconds"]), sum(row["seconds"])
    for rank, (sent, outside) in enumerate(zip(row["sent"], row["outside"], strict=True)):
        if row["theory"] is not None:
            least, most = LEAST * row["theory"], MOST * row["theory"] + SLACK * steps
            if not least <= sent <= most:
                found.append(f"rank {rank} sent {sent} bytes, and by theory {least:.0f} to {most:.0f}")
        if sent > window * case.mbit * 1e6 / 8 + 2 * BURST:
            found.append(f"rank {rank} sent {sent} bytes in {window:.2f} s, more than {case.mbit} Mbit/s let through")
        ends = (outside["sent"], outside["sent_at_hub"])
        if max(ends) - min(ends) > 0.001 * max(ends) + SLACK or sent > outside["sent"]:
            found.append(f"rank {rank} sent {sent} bytes, {ends[0]} in all, and the bridge got {ends[1]} from it")
    sent, received = sum(row["sent"]), sum(row["received"])
    if abs(sent - received) > 0.01 * sent + SLACK * steps:
        found.append(f"{sent} bytes were sent and {received} received")
    if row["replicas"] != 1:
        found.append(f"{row['replicas']} different replicas at the end")
    return found


def seconds_to(target: float, row: Row) -> float | None:
    """From the first step's start until the smoothed loss is there, the warm-up counted; None if it never is."""
    steps = steps_to(target, row)
    return None if steps is None else float(row["ends"][steps - 1])


def steps_to(target: float, row: Row) -> int | None:
    """The same in steps."""
    losses = row["losses"]
    return next((k for k in range(SMOOTH, len(losses) + 1) if fmean(losses[k - SMOOTH : k]) <= target), None)


def summary(row: Row) -> str:
    if "skipped" in row or "failed" in row:
        return str(row.get("skipped") or row["failed"])
    if row["contender"] == LINE:
        return f"{row['mbit']:.1f} Mbit/s, {row['trip_ms']:.3f} ms there and back"
    sent = median(row["sent"]) / len(row["seconds"]) / 1e6
    return f"{1000 * median(row['seconds']):.0f} ms/step, {sent:.2f} MB sent, loss {row['losses'][-1]:.3f}"


def table(case: Case, rows: Iterable[Row]) -> str:
    """All rounds of each contender together, beside DDP in fp32."""
    mine = [row for row in rows if {**row["case"], "rate": case.rate} == asdict(case)]  # whatever their rates
    lines = [f"{title(case)}:", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    base = _figures(case, [row for row in mine if row["contender"] == FP32 and "seconds" in row])
    for name in CONTENDERS:
        here = [row for row in mine if row["contender"] == name]
        figures = _figures(case, [row for row in here if "seconds" in row])
        if figures:
            lines.append(f"| {name} | {' | '.join(_cells(figures, base))} |")
        why = dict.fromkeys(summary(row).splitlines()[0] for row in here if "seconds" not in row)  # once for all rounds
        lines += [f"| {name} | {each} {'|' * (len(COLUMNS) - 1)}" for each in why]
    lines += ["", *(f"{LINE}: {summary(row)}." for row in mine if row["contender"] == LINE)]
    trained = [row for row in mine if "seconds" in row]
    if trained:
        others = [row["others"] for row in trained]
        lines += [f"Others had {min(others):.0%} to {max(others):.0%} of the cores during the runs."]
        drops = sum(one["drops"] for row in trained for one in row["outside"])
        lines += [f"Packets dropped by the limits: {drops}."]
    lines += [f"WRONG: {row['contender']}, round {row['round']}: {what}" for row in trained for what in row["wrong"]]
    return "\n".join(lines) + "\n"


def title(case: Case) -> str:
    notes = [f"{case.ranks} ranks", f"{sum(map(prod, case.shapes())) / 1e6:.2f}M parameters", f"batch {case.batch} of each rank"]
    return f"{case.mbit} Mbit/s, {', '.join(notes)}, loss to reach {case.target}"


def _figures(case: Case, rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    seconds = [second for row in rows for second in row["seconds"]]
    reached = [seconds_to(case.target, row) for row in rows]
    sent = [nbytes / len(row["seconds"]) for row in rows for nbytes in row["sent"]]
    return {
        "median": median(seconds),
        "rounds": [median(row["seconds"]) for row in rows],
        "sent": median(sent),
        "theory": rows[0]["theory"] / len(rows[0]["seconds"]) if rows[0]["theory"] is not None else None,
        "loss": fmean(rows[0]["losses"][-SMOOTH:]),
        "reached": None if None in reached else median(second for second in reached if second is not None),
        "rate": rows[0]["case"]["rate"],
        "resident": max(nbytes for row in rows for nbytes in row["resident_nbytes"]),
    }


def _cells(figures: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    reached = figures["reached"]
    return [
        f"{1000 * figures['median']:.0f}",
        f"{1000 * min(figures['rounds']):.0f} to {1000 * max(figures['rounds']):.0f}",
        f"{base['median'] / figures['median']:.2f}" if base else "",
        f"{figures['sent'] / 1e6:.3f}",
        f"{figures['sent'] / figures['theory']:.3f}" if figures["theory"] else "",
        f"{figures['loss']:.3f}",
        "never" if reached is None else f"{reached:.2f}",
        f"{base['reached'] / reached:.2f}" if reached and base and base["reached"] else "",
        f"{figures['rate']:g}",
        f"{figures['resident'] / 2**20:.0f} MiB",
    ]
