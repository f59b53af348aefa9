"""The probe of operators: every class in both dtypes, with the sizes that torch counts."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from scrimp import Cluster
from scrimp.cluster import CLASSES
from scrimp.cluster._operators import BY_FLOPS
from scrimp.engine.schedule.operator_probe import CPU, DTYPES, Calls
from tests.support.probes import hurry_operators

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CPU_ATTENTION = {  # which torch's counter leaves out
    ATTENTION: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value),
    ATTENTION_BACKWARD: lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(grad, query, key, value),
}


@pytest.mark.parametrize("operators", BY_FLOPS)
def test_sizes_of_contractions_are_the_flops_that_torch_counts(operators: str) -> None:
    calls = Calls(torch.device("cpu"), torch.float32, CPU)
    for call in (*calls.ladder(operators), *calls.others(operators)):
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counted:
            call.run()
        assert call.size == counted.get_total_flops()


def test_all_classes_in_both_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_operators(monkeypatch)
    state = torch.get_rng_state()
    cluster = Cluster.probe("cpu", operators=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert cluster.operators is not None
    found = [(rate.operators, rate.dtype) for rate in cluster.operators.rates]
    assert found == [(name, str(dtype).removeprefix("torch.")) for dtype in DTYPES for name in CLASSES]
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert json.loads(cluster.to_json())["version"] == 3
