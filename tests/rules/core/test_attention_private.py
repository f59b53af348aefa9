"""Says when a private attention operator of torch changes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from scrimp.rules.core import attention_private as door
from scrimp.rules.core.schema_private import schema

SCHEMAS = {
    door.CPU: "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, "
    "float? scale=None) -> (Tensor output, Tensor logsumexp)",
    door.CPU_BACKWARD: "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
    "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    door.FLASH: "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool "
    "return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, "
    "SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    door.FLASH_BACKWARD: "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor "
    "cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, Tensor "
    "philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    door.CUDNN: "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool "
    "is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, "
    "Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)",
    door.CUDNN_BACKWARD: "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor "
    "philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float "
    "dropout_p, bool is_causal, *, float? scale=None) -> (Tensor, Tensor, Tensor)",
    door.EFFICIENT: "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
    "bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor "
    "philox_offset)",
    door.EFFICIENT_BACKWARD: "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor "
    "logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, "
    "float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
}


@pytest.mark.parametrize("operator", SCHEMAS, ids=str)
def test_its_arguments_and_results_are_those_that_are_used(operator: torch._ops.OpOverload) -> None:
    assert str(operator._schema).removeprefix(operator._schema.name) == SCHEMAS[operator]


def test_torchs_choice_of_a_kernel_is_a_number_of_its_enumeration() -> None:
    assert int(SDPBackend.CUDNN_ATTENTION) == door.CUDNN_CHOICE
    q = torch.randn(2, 4, 8, 16)
    assert torch._fused_sdp_choice(q, q, q, None, 0.0, True, enable_gqa=False) == int(SDPBackend.FLASH_ATTENTION)


def test_on_the_cpu_it_is_the_operator_itself() -> None:
    """With the operator's arguments by position and by name, as `schema` has them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 16) for heads in (4, 2, 2))
    for target, function in door.FUNCTIONS.items():
        found = schema(target)
        assert found is not None
        assert found.function is function
    mask = torch.randn(2, 1, 5, 5)
    ours, theirs = (run(q, k, v, 0.0, False, attn_mask=mask, scale=0.3) for run in (door.attention, door.CPU))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    given = (torch.randn_like(q), q, k, v, *ours, 0.0, False)
    back, reference = (run(*given, attn_mask=mask, scale=0.3) for run in (door.attention_backward, door.CPU_BACKWARD))
    assert all(torch.equal(one, other) for one, other in zip(back, reference, strict=True))
