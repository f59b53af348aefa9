"""The zoo: models that learn, build on meta and have their published sizes; text and images that are what they say."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from scrimp import zoo
from scrimp.errors import ScrimpError
from scrimp.zoo.bert import IGNORE

TINY = [name for name in zoo.names() if "tiny" in name]
CAUSAL = ["gpt-tiny", "llama-tiny", "moe-tiny"]


def materialize(model: nn.Module) -> nn.Module:
    """From meta to the CPU, as any tool would do it: each module fills what it holds itself."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):  # so that what no one fills is seen
            tensor.fill_(math.nan if tensor.is_floating_point() else -1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
    return model


def train(model: nn.Module, batches: list[tuple[Tensor, ...]], lr: float) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for batch in batches:
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_every_family_has_a_tiny_model() -> None:
    assert {name.split("-")[0] for name in TINY} == {"gpt", "llama", "bert", "vit", "resnet", "vgg", "moe"}


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_learn_from_batches_they_have_not_seen(name: str) -> None:
    torch.manual_seed(0)
    losses = train(zoo.build(name), [zoo.example_batch(name, 16, step) for step in range(25)], lr=5e-3)
    assert statistics.mean(losses[-5:]) < 0.95 * statistics.mean(losses[:3]), losses


@pytest.mark.parametrize("name", TINY)
def test_without_targets_forward_gives_logits(name: str) -> None:
    inputs, targets = zoo.example_batch(name, 3)
    model = zoo.build(name)
    config = zoo.config(name)
    shape = (3, config.classes) if inputs.is_floating_point() else (3, config.seq, config.vocab)  # type: ignore[union-attr]
    assert model(inputs).shape == shape
    assert model(inputs, targets).shape == ()


@pytest.mark.parametrize("name", CAUSAL)
def test_decoders_see_no_later_token(name: str) -> None:
    model = zoo.build(name).eval()
    tokens, _ = zoo.example_batch(name)
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert ((before - after)[:, 20:].abs().amax((0, 2)) > 1e-6).all()


def test_the_encoder_sees_later_tokens() -> None:
    model = zoo.build("bert-tiny").eval()
    tokens, _ = zoo.example_batch("bert-tiny")
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 64
    assert ((model(tokens) - model(changed))[:, :20].abs().amax((0, 2)) > 1e-6).all()


def test_eager_attention_is_fused_attention() -> None:
    models = [zoo.build("gpt-tiny", attention=attention) for attention in ("fused", "eager")]
    models[1].load_state_dict(models[0].state_dict())
    losses = [model(*zoo.example_batch("gpt-tiny")) for model in models]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    with pytest.raises(ScrimpError, match="attention cannot be 'slow': it is 'fused' or 'eager'"):
        zoo.build("gpt-tiny", attention="slow")


def test_rotary_attention_depends_on_distance_alone() -> None:
    from scrimp.zoo.llama import Rotary, rotate

    cos, sin = Rotary(16, 8, 10000.0)(16)
    q, k = torch.randn(2, 1, 1, 1, 8)
    scores = rotate(q.expand(1, 1, 16, 8), cos, sin)[0, 0] @ rotate(k.expand(1, 1, 16, 8), cos, sin)[0, 0].T
    for distance in range(-8, 8):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert scores[0].std() > 1e-3


@pytest.mark.parametrize("name", TINY)
def test_a_model_from_meta_is_the_model_built_at_once(name: str) -> None:
    with torch.device("meta"):
        empty = zoo.build(name)
        batch = zoo.example_batch(name)
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert all(tensor.device.type == "cpu" for tensor in batch)
    torch.manual_seed(3)
    model = materialize(empty)
    torch.manual_seed(3)
    direct = zoo.build(name)
    for group in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(model, group)()), dict(getattr(direct, group)())
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), key
    assert math.isfinite(model(*batch).item())


@pytest.mark.parametrize("name", zoo.names())
def test_whatever_holds_tensors_can_fill_them(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    for module in model.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()  # type: ignore[operator]


def test_tied_weights_are_one_parameter_also_after_materializing() -> None:
    with torch.device("meta"):
        models = [zoo.build("gpt-tiny"), zoo.build("bert-tiny")]
    for model in [*models, *map(materialize, models), zoo.build("gpt-tiny"), zoo.build("bert-tiny")]:
        head = model.head if isinstance(model, zoo.GPT) else model.decoder
        assert model.embed.weight is head.weight  # type: ignore[union-attr]
        assert sum(weight.shape == (64, 32) for weight in model.parameters()) == 1
    loose = zoo.build("gpt-tiny", tie=False)
    assert sum(weight.shape == (64, 32) for weight in loose.parameters()) == 2


# As published, or as counted in the usual implementations (Hugging Face, torchvision).
SIZES = {
    "gpt-125m": 124_439_808,
    "gpt-1b3": 1_315_723_264,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-b16": 86_567_656,
    "vit-l16": 304_326_632,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "vgg16-bn": 138_365_992,
}


@pytest.mark.parametrize("name", SIZES)
def test_presets_have_their_published_sizes(name: str) -> None:
    with torch.device("meta"):
        assert sum(weight.numel() for weight in zoo.build(name).parameters()) == SIZES[name]


@pytest.mark.parametrize(("name", "billions"), [("gpt-2b7", 2.7), ("gpt-6b7", 6.7), ("gpt-13b", 13), ("gpt-175b", 175)])
def test_gpt_presets_are_as_large_as_they_are_called(name: str, billions: float) -> None:
    with torch.device("meta"):
        assert sum(weight.numel() for weight in zoo.build(name).parameters()) == pytest.approx(billions * 1e9, rel=0.03)


def test_the_mixture_is_what_two_experts_give_each_token() -> None:
    from scrimp.zoo.moe import Mixture, MoEConfig

    torch.manual_seed(0)
    mixture = Mixture(MoEConfig(dim=8, heads=1, experts=4, expansion=2))
    x = torch.randn(2, 5, 8)
    mixed, balance = mixture(x)
    weights = mixture.experts
    for row in range(2):
        for t in range(5):
            scores = mixture.router(x[row, t])
            two = scores.argsort(descending=True)[:2]
            wanted = torch.zeros(8)
            for part, e in zip(scores[two].softmax(0), two, strict=True):
                hidden = nn.functional.gelu(x[row, t] @ weights.up[e] + weights.up_bias[e, 0])
                wanted = wanted + part * (hidden @ weights.down[e] + weights.down_bias[e])
            torch.testing.assert_close(mixed[row, t], wanted)
    nn.init.zeros_(mixture.router.weight)  # then all probabilities are alike, whatever is chosen
    assert float(mixture(x)[1].detach()) == pytest.approx(1.0)
    assert float(balance.detach()) != pytest.approx(1.0)


def test_the_extra_loss_spreads_the_work_over_the_experts() -> None:
    def uneven(weight: float) -> float:
        torch.manual_seed(0)
        model = zoo.build("moe-tiny", balance=weight)
        train(model, [zoo.example_batch("moe-tiny", 8, step) for step in range(40)], lr=5e-3)
        seen: list[float] = []
        for block in model.blocks:  # type: ignore[union-attr]
            block.mixture.register_forward_hook(lambda _, inputs, outputs: seen.append(outputs[1].item()))
        model(*zoo.example_batch("moe-tiny", 8, step=1000))
        return statistics.mean(seen) - 1

    assert abs(uneven(0.1)) < 0.5 * uneven(0.0)


# -- text and images


@pytest.mark.parametrize(("vocab", "seed"), [(64, 0), (64, 1), (16, 0)])
def test_the_entropy_of_long_text_is_the_stated_one(vocab: int, seed: int) -> None:
    grammar = zoo.Grammar(vocab=vocab, seed=seed)
    text = grammar.tokens(400_000, seed=7)
    pairs = torch.bincount(text[:-1] * vocab + text[1:], minlength=vocab**2).view(vocab, vocab).double()
    joint = pairs / pairs.sum()
    first = joint.sum(1)
    unigram = -torch.special.xlogy(first, first).sum()
    bigram = -torch.special.xlogy(joint, joint).sum()
    assert float(bigram - unigram) == pytest.approx(grammar.entropy, rel=0.02)
    assert float(unigram) == pytest.approx(grammar.unigram_entropy, rel=0.02)
    assert grammar.entropy < 0.6 * grammar.unigram_entropy
    # One token is all the past there is: two of them tell no more.
    triples = torch.bincount((text[:-2] * vocab + text[1:-1]) * vocab + text[2:], minlength=vocab**3).double()
    triples /= triples.sum()
    assert float(-torch.special.xlogy(triples, triples).sum() - bigram) == pytest.approx(grammar.entropy, rel=0.02)


def test_the_entropy_is_that_of_the_transition_matrix() -> None:
    grammar = zoo.Grammar(vocab=24, seed=5)
    text = grammar.tokens(300_000).tolist()
    allowed: dict[int, set[int]] = {}
    for a, b in pairwise(text):
        allowed.setdefault(a, set()).add(b)
    assert len(allowed) == 24
    assert len(allowed[0]) == 4
    assert all(len(after) == 5 and 0 in after for word, after in allowed.items() if word)
    # The same by linear algebra: the left eigenvector of the dense matrix to eigenvalue 1.
    matrix = torch.zeros(24, 24, dtype=torch.float64).scatter_(1, grammar._next, grammar._chance)
    values, vectors = torch.linalg.eig(matrix.T)
    stationary = vectors[:, (values - 1).abs().argmin()].real
    stationary /= stationary.sum()
    entropy = -(stationary[:, None] * torch.special.xlogy(matrix, matrix)).sum()
    assert grammar.entropy == pytest.approx(float(entropy), rel=1e-9)


def test_text_is_the_same_each_time_and_another_by_seed() -> None:
    text = zoo.Grammar().tokens(5000, seed=1)
    assert text.dtype == torch.int64
    assert torch.equal(text, zoo.Grammar(vocab=64, seed=0).tokens(5000, seed=1))
    assert torch.equal(text[:700], zoo.Grammar().tokens(700, seed=1))
    assert not torch.equal(text, zoo.Grammar().tokens(5000, seed=2))
    assert not torch.equal(text, zoo.Grammar(seed=1).tokens(5000, seed=1))
    assert len(zoo.Grammar().tokens(0)) == 0
    inputs, targets = zoo.Grammar().batch(8, 32, step=4)
    assert inputs.shape == targets.shape == (8, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[:3], zoo.Grammar().batch(3, 32, step=4)[0])
    assert not torch.equal(inputs, zoo.Grammar().batch(8, 32, step=5)[0])


def test_masked_text_hides_equally_many_tokens_of_each_row() -> None:
    grammar = zoo.Grammar(vocab=63)
    inputs, targets = grammar.masked(64, 40, step=1, mask=63)
    plain, _ = grammar.batch(64, 40, step=1)
    hidden = targets != IGNORE
    assert (hidden.sum(1) == 6).all()
    assert torch.equal(targets[hidden], plain[hidden])
    assert torch.equal(inputs[~hidden], plain[~hidden])
    assert 0.7 < float((inputs[hidden] == 63).float().mean()) < 0.9
    assert inputs.max() == 63


def test_images_are_the_same_each_time_and_their_pixels_tell_nothing_alone() -> None:
    images, labels = zoo.Images(classes=4, size=16).batch(2000, step=2)
    assert images.shape == (2000, 3, 16, 16)
    assert set(labels.tolist()) == {0, 1, 2, 3}
    again, same = zoo.Images(classes=4, size=16).batch(5, step=2)
    assert torch.equal(again, images[:5])
    assert torch.equal(same, labels[:5])
    assert not torch.equal(images[:5], zoo.Images(classes=4, size=16).batch(5, step=3)[0])
    for label in range(4):
        assert images[labels == label].mean(0).abs().max() < 0.15


def test_a_one_layer_gpt_comes_near_the_floor_and_not_below() -> None:
    torch.manual_seed(0)
    settings = {"vocab": 32, "seq": 32, "dim": 32, "heads": 2, "layers": 1}
    grammar = zoo.Grammar(vocab=32)
    model = zoo.build("gpt-tiny", **settings)
    train(model, [grammar.batch(16, 32, step) for step in range(250)], lr=1e-2)
    with torch.no_grad():
        loss = float(model(*grammar.batch(400, 32, step=10_000)))
    assert 0.98 * grammar.entropy < loss < 1.1 * grammar.entropy < grammar.unigram_entropy


# -- names


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ScrimpError, match=r"no model 'gpt-9b'; it has gpt-tiny, gpt-125m, .*moe-tiny"):
        zoo.build("gpt-9b")
    with pytest.raises(ScrimpError, match="no setting depth; it has vocab, seq, dim"):
        zoo.build("gpt-tiny", depth=3)
    with pytest.raises(ScrimpError, match="dim 32 is not a multiple of heads 5"):
        zoo.build("gpt-tiny", heads=5)


def test_a_row_that_is_too_long_is_refused() -> None:
    for name in (*CAUSAL, "bert-tiny"):
        with pytest.raises(ValueError, match="40 tokens in a row, but the model has positions for 32"):
            zoo.build(name)(torch.zeros(1, 40, dtype=torch.long))


@pytest.mark.parametrize("name", TINY)
def test_a_batch_on_meta_has_the_shapes_of_a_real_one(name: str) -> None:
    from scrimp.zoo._build import example_on_meta

    real, bare = zoo.example_batch(name, 3), example_on_meta(name, 3)
    assert [(each.shape, each.dtype) for each in bare] == [(each.shape, each.dtype) for each in real]
    assert {each.device.type for each in bare} == {"meta"}
