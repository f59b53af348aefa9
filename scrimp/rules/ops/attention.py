"""Scaled dot-product attention, for torch's kernels: the CPU's, and CUDA's flash, efficient and cudnn. Batch and heads may be
split, and rows of the query unless the mask is "causal", which counts rows from the first. Rows of keys and values, and the head
dim, stay unsplit. With a split query the gradients of keys and values are partial sums."""

from __future__ import annotations

from functools import partial

from scrimp.rules.core.builder import Draft
from scrimp.rules.core.call import Call
from scrimp.rules.core.local_context import family
from scrimp.rules.core.rule import FREE, SUM, WHOLE, Dims, Rule

_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_FLASH = "_scaled_dot_product_flash_attention"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_CUDNN = "_scaled_dot_product_cudnn_attention"
_KINDS = (_CPU, _FLASH, _EFFICIENT, _CUDNN)


def _operands(call: Call, draft: Draft, kind: str, *, backward: bool) -> tuple[Dims, Dims, Dims, Dims, Dims]:
    """Dims of query, key, value, result and log-sum-exp. With grouped queries, the query heads of one key head stay together."""
    batch, heads, rows, width = call.shape("query")
    shared = call.shape("key")[1]
    b, h = draft.dim(batch), draft.dim(shared)
    share = draft.dim(heads // shared, SUM if backward else FREE)
    fixed = call.arguments["is_causal"] or kind == _EFFICIENT  # the efficient kernel pads the log-sum-exp's rows
    q = draft.dim(rows, WHOLE if fixed else SUM if backward else FREE)
    s, d, e = draft.dim(call.shape("key")[2], WHOLE), draft.dim(width, WHOLE), draft.dim(call.shape("value")[3], WHOLE)
    query, key, value, out = (b, (*h, *share), q, d), (b, h, s, d), (b, h, s, e), (b, (*h, *share), q, e)
    draft.put("query", query)
    draft.put("key", key)
    draft.put("value", value)
    mask = "attn_mask" if kind == _CPU else "attn_bias"
    draft.stretched(mask, (b, (*h, *share), q, s))
    log_sum = (b, (*h, *share), draft.dim(-(-rows // 32) * 32, WHOLE) if kind == _EFFICIENT else q)
    return query, key, value, out, (*log_sum, ()) if kind == _CUDNN else log_sum


def _forward(kind: str, call: Call) -> Rule | None:
    if call.arguments["dropout_p"] != 0:
        return None  # the kernel draws by the whole shape
    draft = Draft(call)
    *_, out, log_sum = _operands(call, draft, kind, backward=False)
    # Random states and lengths are the same for all; without dropout nothing depends on them.
    rest = [None if made is None else draft.dims(made, WHOLE) for made in call.made[2:]]
    return draft.rule(out, log_sum, *rest)


def _backward(kind: str, call: Call) -> Rule | None:
    if call.arguments["dropout_p"] != 0 or _mask_wants_gradient(call):
        return None
    draft = Draft(call)
    query, key, value, out, log_sum = _operands(call, draft, kind, backward=True)
    gradient = "grad_out_" if kind == _EFFICIENT else "grad_out"
    draft.put(gradient, out)
    draft.put("out", out)
    draft.put("logsumexp", log_sum)
    return draft.rule(query, key, value, None, linear=[(gradient,)])


def _mask_wants_gradient(call: Call) -> bool:
    return bool(call.arguments.get("grad_input_mask", (False,))[-1])


ATTENTION = family(
    {
        **{f"aten.{kind}.default": partial(_forward, kind) for kind in _KINDS},
        **{f"aten.{kind}_backward.default": partial(_backward, kind) for kind in _KINDS},
    }
)
