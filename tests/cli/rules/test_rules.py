"""`scrimp rules`: what is listed, checked and found, and what it says where it cannot."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from scrimp.rules import known_targets
from scrimp.rules.ops import registry as knowing
from tests.cli.test_cli import _plain_wide_output, scrimp

__all__ = ["_plain_wide_output"]  # a fixture, for every test here


@pytest.mark.parametrize("words", [["rules"], ["rules", "list"]])
def test_operators_that_have_rules_are_listed(words: list[str]) -> None:
    text = scrimp(*words).output
    assert {*re.findall(r"(?:aten|scrimp)\.\w+\.\S+", text)} == known_targets()
    assert f"{len(known_targets())} operators" in text


@pytest.mark.parametrize("command", ["check", "discover"])
def test_examples_of_the_help_work(command: str) -> None:
    text = scrimp("rules", command, "--help").output
    examples = re.findall(rf"^ +scrimp rules ({command} .*?) *$", text, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        scrimp("rules", *example.split())


def test_a_known_rule_is_checked() -> None:
    text = scrimp("rules", "check", "aten.mm.default", "--shapes", "4x6,6x8").output
    assert "aten.mm.default(4x6, 6x8) -> 4x8" in text
    assert "factors 4 free, 6 sum, 8 free" in text
    assert re.search(r"right in \d+ ways to split it, with 2 draws of numbers each, on the meshes x=2 x=3 x=2,y=2", text)


def test_a_wrong_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(knowing._RULES, "aten.mm.default", knowing.written("a b, b c -> a c"))
    text = scrimp("rules", "check", "mm", code=1).output
    assert "wrong: aten.mm.default, output 0" in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["aten.mm.default", "--shapes", "4x6,6x10"], "a b, b c -> a c; sum b; linear 0; linear 1"),
        (["addmm", "--shapes", "10,4x6,6x10"], "a, b c, c a -> b a; sum c; given beta=1; given alpha=1"),
        (["outer"], "a, b -> a b; linear 0; linear 1"),
        (["aten.glu", "--set", "dim=1"], "a w0 -> a w1; whole w0 w1; given dim=1"),
    ],
)
def test_a_rule_is_found_and_printed_for_the_table(words: list[str], line: str) -> None:
    text = scrimp("rules", "discover", *words).output
    ((target, found),) = ast.literal_eval("{" + text.splitlines()[-1] + "}").items()
    assert target.endswith(f"{words[0].split('.')[1] if '.' in words[0] else words[0]}.default")
    assert found == line
    assert re.search(r"tried \d+ ways to equate dims of one size", text)
    assert "these sizes: right in" in text


def test_where_nothing_may_be_split_it_says_so() -> None:
    text = scrimp("rules", "discover", "aten.flip.default", "--shapes", "6", "--set", "dims=[0]", code=1).output
    assert "no dim may be split" in text


OWN = """
import torch


@torch.library.custom_op("{library}::halves", mutates_args=())
def halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 0.5 + y.cumsum(1)
"""


def test_an_operator_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_operators.py").write_text(OWN.format(library="scrimp_cli_test"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(knowing, "_RULES", dict(knowing._RULES))
    text = scrimp("rules", "discover", "scrimp_cli_test.halves.default", "--load", "own_operators").output
    line = text.splitlines()[-1]
    assert line == '"scrimp_cli_test.halves.default": "a w0, a w1 -> a w2; whole w0 w1 w2",'
    assert scrimp("rules", "check", "scrimp_cli_test.halves", code=2)
    assert knowing.learn(line) == "scrimp_cli_test.halves.default"
    assert "right in" in scrimp("rules", "check", "scrimp_cli_test.halves").output
    sys.modules.pop("own_operators", None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check", "aten.admm.default"], r"torch has no operator 'aten\.admm\.default'; there are .*aten\.addmm\.default"),
        (["discover", "addm"], r"no operator 'addm'; there are .*aten\.addmm\.default"),
        (["discover", "aten.add"], r"no operator 'aten\.add'; there are .*aten\.add\.Tensor"),
        (["discover", "nothing_like_it_anywhere"], r"torch has no operator .* write it as aten\.addmm\.default"),
        (["check", "aten.glu.default"], r"aten\.glu\.default has no rule for .*; scrimp rules discover aten\.glu\.default"),
        (["check", "mm", "--shapes", "4x6,4x6"], r"does not take the shapes 4x6,4x6 \(.*\); it needs self: Tensor, mat2: Tensor"),
        (["check", "mm", "--shapes", "4x6,6x8,3"], r"3 shapes for 2 tensors: self, mat2"),
        (["check", "mm", "--shapes", "4*6"], r"'4\*6' is not a shape; write 4x6,6x8"),
        (["check", "mm", "--shapes", "4x6:real"], r"torch has no dtype 'real'"),
        (["check", "mm", "--set", "dim"], r"write it as name=value"),
        (["check", "mm", "--set", "dim=1"], r"aten\.mm\.default has no argument dim; it has self, mat2"),
        (["discover", "aten.add_.Tensor"], r"writes into its operands"),
        (["discover", "aten.linalg_cholesky.default"], r"found that aten\.linalg_cholesky\.default takes \(.*square"),
        (["discover", "aten.bernoulli.default"], r"it draws random numbers, so its results differ each time"),
        (["discover", "aten._fft_c2c.default"], r"no arguments were found that aten\._fft_c2c\.default takes .*--shapes"),
        (["check", "aten.scatter.value", "--shapes", "4x6,4x12", "--set", "dim=1", "--set", "value=1.0"],
         r"aten\.scatter\.value cannot be tried on random numbers: .*exceeds dimension"),
        (["check", "mm", "--load", "no_such_module"], r"--load no_such_module: No module named"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_said(words: list[str], says: str) -> None:
    assert re.search(says, scrimp("rules", *words, code=2).stderr)


def test_a_line_that_is_no_rule_is_refused() -> None:
    from scrimp import ScrimpError

    for line in ("nothing", '"aten.mm.default"', '"aten.mm.default": 3'):
        with pytest.raises(ScrimpError, match="is not a rule as `scrimp rules discover` prints it"):
            knowing.learn(line)
