"""Model families in train mode: LayerDrop of 0, experts, shifted labels; and what is said where a family cannot be planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scrimp import plan, zoo
from scrimp.capture import Graph, capture
from scrimp.errors import CaptureError, FitError
from scrimp.planner.answers.plan import KeptWhole
from scrimp.planner.api import captured
from scrimp.planner.cost.zero_levels import precision_of
from scrimp.rules import rule_of
from tests.capture.test_capture import assert_runs_like, state_of
from tests.support import capture_models
from tests.support.graph_runner import run

transformers = pytest.importorskip("transformers")

VOCAB = 64
STACK = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": VOCAB, "max_position_embeddings": 32, "pad_token_id": 1,
    "decoder_start_token_id": 2, "eos_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32}
MIXTRAL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip
WHISPER = {
    **STACK, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "bos_token_id": 1, "suppress_tokens": [],
    "begin_suppress_tokens": [],
}  # fmt: skip


def tokens() -> Tensor:
    return torch.zeros(4, 16, dtype=torch.int64)


def text() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def stack(name: str, model: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**STACK, **settings})
    return getattr(transformers, model)(config)  # type: ignore[no-any-return]


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "opt": (
        lambda: transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=VOCAB, max_position_embeddings=32, **OPT)),
        text,
    ),
    "bart": (lambda: stack("Bart", "BartForConditionalGeneration"), text),
    "mbart": (lambda: stack("MBart", "MBartForConditionalGeneration"), text),
    "pegasus": (lambda: stack("Pegasus", "PegasusForConditionalGeneration"), text),
    "whisper": (
        lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)),
        lambda: {"input_features": torch.zeros(4, 8, 16), "labels": tokens()},
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
            )
        ),
        text,
    ),
    "mixtral": (lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)), text),
}
QUICK = ("opt", "t5", "mixtral")


def without_rule(graph: Graph) -> Iterator[str]:
    for each in graph.graphs:
        values = {value.name: value for value in each.values}
        yield from (op.target for op in each.ops if rule_of(op, values) is None)


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in QUICK else (pytest.mark.full,)) for name in FAMILIES])
def test_families_in_train_mode(family: str) -> None:
    """They are captured with dropout, and every operator has a rule."""
    make, batch = FAMILIES[family]
    precision = precision_of("bf16", "adamw")
    assert precision is not None
    with torch.device("meta"):
        model = make()
    graph = captured(model.train(), batch(), precision)
    assert {*without_rule(graph)} == set()
    assert model.training


def test_experts_as_products_of_groups_run_like_the_model() -> None:
    """In bf16: for others torch knows no shapes of it, and Hugging Face takes a loop over the data."""
    model = capture_models.build("mixtral", experts_implementation="grouped_mm").bfloat16()
    batch = capture_models.batch("mixtral")
    graph = capture(model, (), batch)
    assert "aten._grouped_mm.default" in targets(graph)
    got = run(graph, state_of(model), batch)
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        # A few numbers are summed up, in another order perhaps, with a rounding each of 2^-9.
        most = float(parameter.grad.abs().max())
        torch.testing.assert_close(got.gradients[name], parameter.grad, rtol=0, atol=2**-6 * most)


def test_layers_that_are_dropped_are_refused_with_what_helps() -> None:
    with torch.device("meta"):
        model = transformers.OPTForCausalLM(
            transformers.OPTConfig(vocab_size=VOCAB, max_position_embeddings=32, layerdrop=0.5, **OPT)
        ).train()
    with pytest.raises(
        CaptureError, match=r"only training mode fails: after model\.eval\(\) the model can be planned.*layerdrop"
    ):
        capture(model, (), text())
    assert all(module.training for module in model.modules())
    assert capture(model.eval(), (), text()).layers


class Drawing(nn.Module):
    """`how`: what becomes of one number drawn from [0, 1)."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.first, x).sum()


def targets(graph: Graph) -> set[str]:
    return {op.target for each in graph.graphs for op in each.ops}


@pytest.mark.parametrize(
    ("runs", "how"),
    [
        (True, lambda first, x: x * 2 if torch.rand([]) < 0 else first(x)),
        (True, lambda first, x: x * 2 if torch.rand(1) < 0.0 else first(x)),
        (True, lambda first, x: first(x) if torch.rand(()) > 0 else x * 2),
        (True, lambda first, x: first(x) if torch.rand(1) <= 1.0 else x * 2),
        (True, lambda first, x: x * 2 if torch.rand([]) >= 1 else first(x)),
    ],
)
def test_a_rate_of_0_or_1_decides(runs: bool, how: Any) -> None:
    found = targets(capture(Drawing(how), (torch.zeros(2, 4),)))
    assert "aten.addmm.default" in found
    assert not any("rand" in target for target in found)


@pytest.mark.parametrize(
    "how",
    [
        lambda first, x: first(x) * torch.rand([]),
        lambda first, x: torch.rand(1) * first(x),
        lambda first, x: first(x) + (torch.rand([]) + 0.5).floor(),
        lambda first, x: torch.where(torch.rand([]) < 0.5, first(x), x),
    ],
)
def test_a_number_that_is_used_is_drawn(how: Any) -> None:
    assert any("rand" in target for target in targets(capture(Drawing(how), (torch.zeros(2, 4),))))


def test_a_draw_that_decides_is_refused() -> None:
    with pytest.raises(CaptureError, match="the forward depends on the values of tensors"):
        capture(Drawing(lambda first, x: x * 2 if torch.rand([]) < 0.5 else first(x)), (torch.zeros(2, 4),))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = scores.argmax(-1)
        counts = torch.bincount(chosen, minlength=4) + chosen.bincount(minlength=4)
        return (scores.mean(0) * counts).sum()


def test_counts_of_classes_are_captured() -> None:
    torch.manual_seed(0)
    model, batch = Counting(), {"x": torch.randn(6, 8)}
    graph = capture(model, (), batch)
    assert {*without_rule(graph)} == set()
    assert_runs_like(model, batch, graph)


def test_operators_whose_cost_is_noise_are_not_told() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=1)
    found = plan(model, zoo.example_batch("gpt-tiny", 8, layers=1), "2xA100-80", time_limit=0)
    peak, step = found.memory.peak_nbytes, found.seconds

    def costly(*costs: tuple[float, float]) -> list[int]:
        whole = tuple(
            KeptWhole(target=f"my.op{k}.default", where="here", times=1, redundant_nbytes=int(nbytes * peak), seconds=part * step)
            for k, (nbytes, part) in enumerate(costs)
        )
        made = replace(found, whole=whole)
        told = [k for k, each in enumerate(whole) if each in made.costly]
        assert [str(each) in made.summary() for each in whole] == [k in told for k in range(len(whole))]
        return told

    assert costly((0.005, 0.005)) == []
    assert costly((0.02, 0.0), (0.0, 0.02), (0.005, 0.001)) == [0, 1]
    assert costly((0.0, 0.006), (0.0, 0.003), (0.0, 0.004)) == [0]  # together they are more than 1 %


def test_what_does_not_fit_is_told_of_the_host_tier() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=2)
    batch = zoo.example_batch("gpt-tiny", 8, layers=2)
    words = (
        r"Or train it without a plan: scrimp\.Engine\(\.\.\., memory=scrimp\.Memory\(device='1MiB'\)\) keeps [\d.]+ KiB "
        r"of weights and optimizer states in the host's memory \(a node has [\d.]+ \wiB\), and brings a layer at a time"
    )
    for stages in (1, 2):
        with pytest.raises(FitError, match=words):
            plan(model, batch, "2xA100-80", memory="1KiB", time_limit=0, stages=stages, activations=("keep",))
