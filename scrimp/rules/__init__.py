"""Sharding rules: how each operator may be split over a mesh, and the numeric proof.

In:   an ATen operator with its arguments' shapes.
Out:  a `Rule`: the operator's dims as factors, which of them may be split, and what is summed afterwards.

    mm:  (m k) x (k n) -> (m n)     m, n: free        k: split gives partial sums

Read in this order:

    core/          a rule as data, layouts from a rule and a choice, following an operand's layout, rules as text
    ops/           one file per family of operators, and the registry
    localized.py   what one member of the mesh runs for its part
    proof/         a rule proven by numbers: the operator on the whole against the operator on parts; rules found by trial
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.rules.core.call import At, bind, on_device
    from scrimp.rules.core.follow import follow
    from scrimp.rules.core.layouts import Split, Sums, choices, factored_shape, fits, layouts, may_split, refine, simplest
    from scrimp.rules.core.rule import FREE, INSIDE, SUM, WHOLE, Dims, Factor, Rule, Scratch, Talk
    from scrimp.rules.core.text import literal, written
    from scrimp.rules.localized import PlainCall, localize, plain_call
    from scrimp.rules.ops.registry import known_targets, learn, rule_of
    from scrimp.rules.proof.check import check
    from scrimp.rules.proof.discover import Tie, discover
    from scrimp.rules.proof.prove import Proof, prove, refuses
    from scrimp.rules.proof.synthetic_calls import Example, example, grown, target_of

__all__ = [
    "FREE", "INSIDE", "SUM", "WHOLE", "At", "Dims", "Example", "Factor", "PlainCall", "Proof", "Rule", "Scratch", "Split",
    "Sums", "Talk", "Tie", "bind", "check", "choices", "discover", "example", "factored_shape", "fits", "follow", "grown",
    "known_targets", "layouts", "learn", "literal", "localize", "may_split", "on_device", "plain_call", "prove", "refine",
    "refuses", "rule_of", "simplest", "target_of", "written",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "At": "scrimp.rules.core.call",
        "bind": "scrimp.rules.core.call",
        "on_device": "scrimp.rules.core.call",
        "follow": "scrimp.rules.core.follow",
        "Split": "scrimp.rules.core.layouts",
        "Sums": "scrimp.rules.core.layouts",
        "choices": "scrimp.rules.core.layouts",
        "factored_shape": "scrimp.rules.core.layouts",
        "fits": "scrimp.rules.core.layouts",
        "layouts": "scrimp.rules.core.layouts",
        "may_split": "scrimp.rules.core.layouts",
        "refine": "scrimp.rules.core.layouts",
        "simplest": "scrimp.rules.core.layouts",
        "FREE": "scrimp.rules.core.rule",
        "INSIDE": "scrimp.rules.core.rule",
        "SUM": "scrimp.rules.core.rule",
        "WHOLE": "scrimp.rules.core.rule",
        "Dims": "scrimp.rules.core.rule",
        "Factor": "scrimp.rules.core.rule",
        "Rule": "scrimp.rules.core.rule",
        "Scratch": "scrimp.rules.core.rule",
        "Talk": "scrimp.rules.core.rule",
        "literal": "scrimp.rules.core.text",
        "written": "scrimp.rules.core.text",
        "PlainCall": "scrimp.rules.localized",
        "localize": "scrimp.rules.localized",
        "plain_call": "scrimp.rules.localized",
        "known_targets": "scrimp.rules.ops.registry",
        "learn": "scrimp.rules.ops.registry",
        "rule_of": "scrimp.rules.ops.registry",
        "check": "scrimp.rules.proof.check",
        "Tie": "scrimp.rules.proof.discover",
        "discover": "scrimp.rules.proof.discover",
        "Proof": "scrimp.rules.proof.prove",
        "prove": "scrimp.rules.proof.prove",
        "refuses": "scrimp.rules.proof.prove",
        "Example": "scrimp.rules.proof.synthetic_calls",
        "example": "scrimp.rules.proof.synthetic_calls",
        "grown": "scrimp.rules.proof.synthetic_calls",
        "target_of": "scrimp.rules.proof.synthetic_calls",
    },
)
