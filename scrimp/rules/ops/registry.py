"""All operators that have a sharding rule."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping

from scrimp.capture import Op, Value
from scrimp.errors import ScrimpError
from scrimp.rules.core.call import bind
from scrimp.rules.core.local_context import Family, RuleOf
from scrimp.rules.core.rule import Rule
from scrimp.rules.core.text import written
from scrimp.rules.ops.attention import ATTENTION
from scrimp.rules.ops.contraction import CONTRACTION
from scrimp.rules.ops.factories import FACTORIES
from scrimp.rules.ops.gather_local import GATHER
from scrimp.rules.ops.grouped import GROUPED
from scrimp.rules.ops.losses import LOSSES
from scrimp.rules.ops.norms import NORMS
from scrimp.rules.ops.pointwise import POINTWISE, is_pointwise, pointwise
from scrimp.rules.ops.pooling import POOLING
from scrimp.rules.ops.reductions import REDUCTIONS
from scrimp.rules.ops.softmax import SOFTMAX
from scrimp.rules.ops.split_cat import PIECES
from scrimp.rules.ops.views import VIEWS

FAMILIES: tuple[Family, ...] = (
    CONTRACTION, GROUPED, ATTENTION, POINTWISE, REDUCTIONS, SOFTMAX, LOSSES, NORMS, VIEWS, PIECES, GATHER, FACTORIES, POOLING,
)  # fmt: skip
# Found by `discover`, in the form it prints.
DISCOVERED: dict[str, str] = {
    "aten.dot.default": "a, a -> ; sum a; linear 0; linear 1",
    "aten.mv.default": "a b, b -> a; sum b; linear 0; linear 1",
}

_RULES: dict[str, RuleOf] = {target: rule for family in FAMILIES for target, rule in family.rules.items()}
_RULES |= {target: written(text) for target, text in DISCOVERED.items()}


def learn(line: str) -> str:
    """Registers a rule in the form that `discover` prints, for this process: for a custom operator, or until it is in the table.
    Returns its target."""
    try:
        found = literal_eval("{" + line + "}")
        ((target, text),) = found.items()
        _RULES[target] = written(text)
    except (SyntaxError, ValueError, AttributeError, KeyError) as error:
        raise ScrimpError(f"{line!r} is not a rule as `scrimp rules discover` prints it: {error}") from error
    return str(target)


def rule_of(op: Op, values: Mapping[str, Value]) -> Rule | None:
    """The operator's sharding rule; None if it has none, and must run unsharded."""
    rule = _RULES.get(op.target) or (pointwise if is_pointwise(op.target) else None)
    call = None if rule is None else bind(op, values)
    return None if rule is None or call is None else rule(call)


def known_targets() -> frozenset[str]:
    """Those with a rule by name; all operators that torch tags as pointwise have one besides."""
    return frozenset(_RULES)
