"""The benchmark of one process: both ways have one loss, and a row is read as it was measured."""

from __future__ import annotations

from bench.run.alone import SAME, in_turns, table


def test_both_ways_give_one_loss() -> None:
    row = in_turns("gpt, 32", rounds=2)
    assert row["difference"] <= SAME
    assert row["operators"] > 100  # of two layers, forward and backward
    assert min(row["seconds"].values()) > 0
    more = row["seconds"]["lowered"] - row["seconds"]["eager"]
    assert abs(row["us_an_operator"] - 1e6 * more / row["operators"]) < 1e-6
    assert "gpt, 32" in table({"gpt, 32": row})
