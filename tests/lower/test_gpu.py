"""Plans that were made on the CPU run on a GPU: `make test-gpu`. All ranks are threads on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import Plan, plan, zoo
from scrimp.capture import capture, fingerprint, to_json
from scrimp.ext.ranks import RankFailure, RankPool, RankTimeout
from scrimp.lower import Generated, Interpreter, Runner, Shards, cut, later_axes, lower, module
from scrimp.planner.baselines.compare import baseline_plan
from scrimp.rules.core import attention_private
from scrimp.rules.core.attention_private import attention, attention_backward
from tests.lower.test_interpret import planned
from tests.lower.test_run import Dropping
from tests.lower.test_run import planned as planned_dropping
from tests.rank_jobs.moves import nccl_hello
from tests.support.lowering.run import Ran, batch_of, plainly, tensors_of, worst_of
from tests.support.lowering.threads import ThreadRank, on_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:the plan was made with torch"),
]


@pytest.fixture(autouse=True)
def _fp32_is_fp32() -> Any:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def stepped(found: Plan, model: nn.Module, batch: Any, runner: type[Runner] = Generated, seed: int = 0) -> list[Ran]:
    """A step of every rank on the GPU; the model and the batch may be anywhere."""
    lowered = lower(found, found.source.graph)

    def job(comm: ThreadRank) -> Ran:
        shards = Shards(lowered.rest, comm, tensors_of(model), later_axes((lowered,), accumulated=False), device="cuda")
        given = batch_of(lowered.graph, batch)
        part = {name: cut(each, lowered.batch[name], comm.mesh, comm.rank).cuda() for name, each in given.items()}
        loss = runner(lowered, comm, shards, seed=seed, device="cuda").step(part)
        assert loss.is_cuda
        return Ran(float(loss), {name: shards.whole_gradient(name).cpu() for name in shards.gradients})

    return on_threads(lowered.mesh, job)


ATTENTION = {  # batch, heads, heads of keys, rows, columns, width, causal, mask
    "causal": (2, 4, 4, 64, 64, 32, True, False),
    "whole": (2, 4, 4, 64, 96, 64, False, False),
    "masked": (2, 4, 4, 40, 72, 32, False, True),
    "grouped": (2, 8, 2, 64, 64, 32, True, False),
    "grouped and masked": (2, 8, 2, 33, 33, 16, False, True),
    "odd rows": (1, 2, 2, 37, 37, 32, True, False),
    "odd width": (2, 4, 4, 48, 48, 20, True, False),
    "more columns than rows": (2, 4, 4, 16, 48, 32, True, False),
}


@pytest.mark.parametrize("cudnn", [True, False], ids=["cudnn", "no cudnn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_on_cuda_is_the_cpu_operators(
    case: str, dtype: torch.dtype, cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients, with their shapes and dtypes, against fp64. In 16 bits the error is at most twice that of the CPU's
    operator: both round their result once, and the probabilities before the second product. In fp32 a sum over 96 columns or
    rows loses up to 96 u of its largest term; the gradients have two such sums, one behind the other."""
    if not cudnn:
        monkeypatch.setattr(attention_private, "CUDNN_CHOICE", None)
    batch, heads, shared, rows, columns, width, causal, masked = ATTENTION[case]
    torch.manual_seed(0)
    q, k, v, given = (
        torch.randn(batch, count, size, width, dtype=dtype)
        for count, size in ((heads, rows), (shared, columns), (shared, columns), (heads, rows))
    )
    mask = torch.randn(batch, 1, rows, columns).to(dtype) if masked else None

    def run(device: str) -> tuple[torch.Tensor, ...]:
        a, b, c, d = (each.to(device) for each in (q, k, v, given))
        bias = None if mask is None else mask.to(device)
        out, log_sum = attention(a, b, c, 0.0, causal, attn_mask=bias)
        return out, log_sum, *attention_backward(d, a, b, c, out, log_sum, 0.0, causal, attn_mask=bias)

    exact = [each.double().requires_grad_() for each in (q, k, v)]
    bias = None if mask is None else mask.double()
    wide = [exact[0], *(each.repeat_interleave(heads // shared, 1) for each in exact[1:])]
    scores = wide[0] @ wide[1].mT * width**-0.5 + (0 if bias is None else bias)
    if causal:
        scores = scores.masked_fill(torch.ones(rows, columns).tril() == 0, -torch.inf)
    out = scores.softmax(-1) @ wide[2]
    out.backward(given.double())
    reference = (out.detach(), scores.detach().logsumexp(-1), *(each.grad for each in exact))
    for name, ours, theirs, right in zip(("out", "log-sum-exp", "q", "k", "v"), run("cuda"), run("cpu"), reference, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        errors = [float((each.cpu().double() - right).norm() / right.norm()) for each in (ours, theirs)]
        floor = 2 * 96 * torch.finfo(torch.float32).eps
        assert errors[0] <= max(2 * errors[1], floor), f"{name}: {errors}"


@pytest.mark.parametrize("way", ["least", "offloaded"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "moe-tiny"])
def test_plans_of_the_cpu_give_their_numbers_on_the_gpu(name: str, way: str) -> None:
    torch.manual_seed(0)
    model, batch = zoo.build(name), zoo.example_batch(name, 8)
    wanted = plainly(model, batch)
    for runner in (Generated, Interpreter):
        for ran in stepped(planned(name, "x=2,y=2", way), model, batch, runner):
            assert ran.loss == pytest.approx(wanted.loss, rel=1e-5)
            assert worst_of(ran, wanted) < (3e-5, "")


def test_a_model_on_the_gpu_has_the_fingerprint_of_one_on_the_cpu() -> None:
    model, batch = zoo.build("gpt-tiny"), zoo.example_batch("gpt-tiny", 8)
    there = capture(copy.deepcopy(model).cuda(), [each.cuda() for each in batch])
    assert fingerprint(there) == fingerprint(capture(model, batch))


@pytest.mark.parametrize("ways", [{"keep"}, {"keep", "recompute"}])
def test_dropout_on_the_gpu_is_the_seeds(ways: set[str]) -> None:
    torch.manual_seed(0)
    model, batch = Dropping(), (torch.randn(32, 16), torch.randn(32, 16))
    found = planned_dropping(model, batch, activations=ways)
    one, again, other = (stepped(found, model, batch, seed=seed) for seed in (1, 1, 2))
    assert [each.loss for each in one] == [one[0].loss] * 4 == [each.loss for each in again]
    assert all(torch.equal(each, again[0].gradients[name]) for name, each in one[0].gradients.items())
    assert one[0].loss != other[0].loss


@pytest.mark.parametrize("ways", [{"keep"}, {"keep", "offload"}, {"keep", "recompute", "offload"}], ids=len)
def test_a_lowered_layer_moves_to_the_gpu(ways: set[str]) -> None:
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny")
    found = plan(model, zoo.example_batch("gpt-tiny", 8), "1xCPU", mesh="x=1", precision="fp32", time_limit=1, activations=ways)
    block, lowered = copy.deepcopy(model.blocks[1]).cuda(), module(found, "blocks.1", model)
    lowered(torch.randn(8, 32, 32)).sum().backward()  # first on the CPU
    lowered.zero_grad()
    lowered.cuda()
    x = torch.randn(8, 32, 32, device="cuda")
    for layer in (lowered, block):
        layer(x).square().sum().backward()
    wanted = Ran(0.0, {name: each.grad for name, each in block.named_parameters()})
    assert worst_of(Ran(0.0, {name: each.grad for name, each in lowered.named_parameters()}), wanted) < (1e-5, "")


SHAPE = {"dim": 512, "heads": 8, "layers": 4, "vocab": 2048, "seq": 256}


@pytest.mark.parametrize("mesh", ["tp=1", "tp=4"])
def test_bf16_is_as_near_to_fp32_as_eager_bf16(mesh: str) -> None:
    """On one rank the kernels are eager's. Over T ranks a row-parallel product is T rounded partial sums, added with T - 1 more
    roundings: variance (1 + T) u^2 instead of u^2, in 4 of about 12 rounded tensors of a block. For T = 4 that is a third of the
    roundings with 5 times the variance: errors grow by sqrt((8 + 4 * 5) / 12) = 1.5. The bound is 2."""
    torch.manual_seed(0)
    model, batch = zoo.build("gpt-tiny", **SHAPE), zoo.example_batch("gpt-tiny", 8, **SHAPE)
    there = [each.cuda() for each in batch]
    exact, eager = plainly(model.cuda(), there), plainly(copy.deepcopy(model).bfloat16(), there)
    size = int(mesh[-1])
    found = baseline_plan(model, batch, f"{size}xCPU", "tp", mesh=mesh, precision="bf16", seconds=3)
    (ours, *_) = stepped(found, copy.deepcopy(model).bfloat16(), batch)

    def error(of: Ran) -> float:
        lost = sum(
            float((of.gradients[name].cpu().float() - each.cpu()).square().sum()) for name, each in exact.gradients.items()
        )
        return float((lost / sum(float(each.square().sum()) for each in exact.gradients.values())) ** 0.5)

    print(
        f"{mesh}: loss fp32 {exact.loss:.6f}, eager {eager.loss:.6f}, lowered {ours.loss:.6f}; errors of gradients "
        f"{error(eager):.3e}, {error(ours):.3e}"
    )
    assert error(ours) <= 2 * error(eager)
    u = torch.finfo(torch.bfloat16).eps / 2
    assert abs(ours.loss - exact.loss) <= max(2 * abs(eager.loss - exact.loss), u * exact.loss)


@pytest.fixture(scope="module")
def nccl() -> Any:
    ranks = RankPool(4, timeout_seconds=60, backend="nccl")
    try:
        ranks.run(nccl_hello)
    except (RankFailure, RankTimeout) as error:
        ranks.close()
        pytest.skip(f"NCCL does not run 4 ranks on {torch.cuda.device_count()} GPUs: {str(error)[-300:]}")
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("name", "way"), [("gpt-tiny", "least"), ("llama-tiny", "fast"), ("moe-tiny", "least")])
def test_ranks_over_nccl_give_the_numbers_of_one_process(nccl: RankPool, name: str, way: str) -> None:
    torch.manual_seed(0)
    wanted = plainly(zoo.build(name), zoo.example_batch(name, 8))
    found = planned(name, "x=2,y=2", way)
    given = (found.to_json(), to_json(found.source.graph), name, {}, 8)
    for loss, gradients in nccl.run("tests.rank_jobs.lowered:step_on_gpu", *given):
        assert loss == pytest.approx(wanted.loss, rel=1e-5)
        assert worst_of(Ran(loss, gradients), wanted) < (3e-5, "")
