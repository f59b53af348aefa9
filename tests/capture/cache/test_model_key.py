"""The key of a capture: equal for equal models, in another process too; another one for every change that a forward can see; none
where a model cannot be seen through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp import zoo
from scrimp.capture import capture_key
from scrimp.capture.cache.model_key import key_or_reason
from scrimp.capture.cache.walk import NotKeyedError, Walk
from tests.capture.cache import keyed_helper, keyed_model
from tests.capture.cache.keyed_model import Inner, Model

BATCH = ("fp32", [("x", (8, 4), "float32")])


def key(model: nn.Module, *more: Any) -> str:
    return key_or_reason(model, *(more or BATCH))


def test_two_models_of_one_kind_have_one_key() -> None:
    torch.manual_seed(0)
    one = Model()
    torch.manual_seed(1)
    assert key(one) == key(one) == key(Model())


def test_a_model_with_custom_operators_has_no_key() -> None:
    assert capture_key(zoo.build("moe-tiny"), *BATCH) is None


@pytest.mark.parametrize("name", [name for name in zoo.names() if "tiny" in name and "moe" not in name])
def test_the_models_of_the_zoo_have_keys(name: str) -> None:
    assert capture_key(zoo.build(name), *BATCH) == capture_key(zoo.build(name), *BATCH)
    assert capture_key(zoo.build(name), *BATCH) != capture_key(zoo.build(name).eval(), *BATCH)


def said(*models: nn.Module) -> list[str]:
    """All that the walks hash, so that a difference can be read, and the keys."""
    words: list[str] = []

    class Listening(Walk):
        def say(self, *more: Any) -> None:
            words.append(repr(more))
            super().say(*more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scrimp.capture.cache.model_key.Walk", Listening)
        keys = [key(model) for model in models]
    return [*words, *keys]


def said_in_a_new_process(*flags: str, seed: str) -> list[str]:
    """Not in this one: other tests may have built models of transformers, which puts a method into `nn.Module`."""
    code = (
        "import json, sys; from scrimp import zoo\n"
        "from scrimp.capture import capture_key; from tests.capture.cache.keyed_model import Model\n"
        f"keys = [capture_key(Model(), *{BATCH!r}), capture_key(zoo.build('gpt-tiny'), *{BATCH!r})]\n"
        "assert 'torch._dynamo' not in sys.modules and 'torch._functorch.aot_autograd' not in sys.modules\n"
        "from tests.capture.cache.test_model_key import said\n"
        "words = said(Model(), zoo.build('gpt-tiny'))\n"
        "assert words[-2:] == keys\n"
        "print(json.dumps(words))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True, env=environment)
    found: list[str] = json.loads(done.stdout)
    return found


def test_another_process_makes_the_same_key() -> None:
    """Whatever the order of its sets, and whether it compiled the modules or read their bytecode."""
    one, other = said_in_a_new_process("-B", seed="1"), said_in_a_new_process(seed="2")
    assert [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]][:3] == []
    assert one == other


def test_a_method_that_others_put_into_torchs_classes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Model())
    monkeypatch.setattr(nn.Module, "smart_apply", other_forward, raising=False)
    assert key(Model()) != before


def other_forward(self: Model, x: Tensor) -> Tensor:
    return self.head(x).square().mean()


def replaced(x: Tensor) -> Tensor:
    return x - 1


GLOBALS: list[tuple[str, Any, str, Any]] = [
    ("a global number", keyed_model, "SCALE", 3.0),
    ("a helper", keyed_model, "activation", replaced),
    ("a global of another file", keyed_helper, "OFFSET", 0.5),
    ("a helper of another file", keyed_helper, "shifted", replaced),
    ("a helper of a helper", keyed_helper, "_inner", replaced),
    ("a table of functions", keyed_model, "TABLE", {"twice": replaced}),
    ("a class's attribute", Inner, "floor", 0.75),
    ("a class's forward", Model, "forward", other_forward),
    ("a base class's method", keyed_model.Base, "mixed", lambda self, x: x),
    ("torch's class", nn.Linear, "forward", lambda self, x: F.linear(x, self.weight)),
    ("torch's function", torch, "relu", replaced),
]


@pytest.mark.parametrize(("owner", "name", "value"), [each[1:] for each in GLOBALS], ids=[each[0] for each in GLOBALS])
def test_code_counts_as_it_is_loaded(owner: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Model())
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        assert key(Model()) != before
    assert key(Model()) == before


def changed(change: Callable[[Model], object]) -> Model:
    model = Model()
    change(model)
    return model


MODELS: list[tuple[str, Callable[[], nn.Module]]] = [
    ("a size", lambda: Model(dim=5)),
    ("the number of layers", lambda: Model(layers=3)),
    ("a setting", lambda: Model(settings={"alpha": 2.0, "sizes": [1, 2, (3, 4)]})),
    ("a nested setting", lambda: Model(settings={"alpha": 1.0, "sizes": [1, 2, (3, 5)]})),
    ("an attribute of one layer", lambda: changed(lambda m: setattr(m.layers[1], "floor", 0.1))),
    ("a new attribute", lambda: changed(lambda m: setattr(m, "flag", True))),
    ("eval mode", lambda: changed(lambda m: m.eval())),
    ("eval mode of one layer", lambda: changed(lambda m: m.layers[0].eval())),
    ("a frozen weight", lambda: changed(lambda m: m.head.weight.requires_grad_(False))),
    ("a dtype", lambda: changed(lambda m: m.double())),
    ("a buffer's shape", lambda: changed(lambda m: setattr(m, "shift", torch.zeros(1)))),
    ("no bias", lambda: changed(lambda m: setattr(m.head, "bias", None))),
    ("a tied weight", lambda: changed(lambda m: setattr(m.head, "weight", m.layers[0].linear.weight))),
    ("a tied module", lambda: changed(lambda m: setattr(m, "head", m.layers[0].linear))),
    ("a method of the object", lambda: changed(lambda m: setattr(m, "forward", types.MethodType(other_forward, m)))),
    ("a function's arguments", lambda: changed(lambda m: m.layers[0].extra.keywords.update(min=-2.0))),
    ("another activation", lambda: changed(lambda m: setattr(m, "head", nn.Sequential(m.head, nn.GELU())))),
    ("its setting", lambda: changed(lambda m: setattr(m, "head", nn.Sequential(m.head, nn.GELU(approximate="tanh"))))),
]


@pytest.mark.parametrize("made", [each[1] for each in MODELS], ids=[each[0] for each in MODELS])
def test_a_change_of_the_model_makes_another_key(made: Callable[[], nn.Module]) -> None:
    assert key(made()) != key(Model())
    assert key(made()) == key(made())


def test_all_changes_have_different_keys() -> None:
    found = [key(made()) for _, made in MODELS]
    assert len({*found}) == len(found)


def test_batch_precision_and_torchs_settings_count() -> None:
    model = Model()
    assert key(model) != key(model, "bf16", BATCH[1])
    assert key(model) != key(model, "fp32", [("x", (16, 4), "float32")])
    assert key(model) != key(model, "fp32", [("x", (8, 4), "float64")])
    before = key(model)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert key(model) != before
    with torch.autocast("cpu"):
        assert key(model) != before


def test_closures_count() -> None:
    def closed(number: float) -> Callable[[Tensor], Tensor]:
        return lambda x: x * number

    def with_closure(number: float) -> Model:
        return changed(lambda m: setattr(m.layers[0], "extra", closed(number)))

    assert key(with_closure(1.0)) == key(with_closure(1.0))
    assert key(with_closure(1.0)) != key(with_closure(2.0))


def test_a_class_made_in_a_function_counts_by_its_code() -> None:
    def made(more: bool) -> nn.Module:
        class Local(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.zeros(4))

            if more:

                def forward(self, x: Tensor) -> Tensor:
                    return (x * self.w).mean() + 1
            else:

                def forward(self, x: Tensor) -> Tensor:
                    return (x * self.w).mean()

        return Local()

    assert key(made(True)) == key(made(True))
    assert key(made(True)) != key(made(False))


def forward_with_eval(self: Model, x: Tensor) -> Tensor:
    return eval("self.head(x).mean()")


def forward_that_imports(self: Model, x: Tensor) -> Tensor:
    import tests.support.never_imported as never  # type: ignore[import-not-found]

    return never.loss(self.head(x))


OPAQUE: list[tuple[str, Callable[[Model], object], str]] = [
    ("a hook", lambda m: m.head.register_forward_hook(lambda *_: None), "_forward_hooks"),
    ("a pre-hook", lambda m: m.register_forward_pre_hook(lambda *_: None), "_forward_pre_hooks"),
    ("a tensor of its own", lambda m: setattr(m, "mask", [torch.zeros(3)]), "neither a parameter nor a buffer"),
    ("a lock", lambda m: setattr(m, "lock", threading.Lock()), "lock"),
    ("a generator", lambda m: setattr(m, "random", torch.Generator()), "Generator"),
    ("a set of objects", lambda m: setattr(m, "found", {object()}), "set"),
    ("eval", lambda m: setattr(m, "forward", types.MethodType(forward_with_eval, m)), "eval"),
    ("a late import", lambda m: setattr(m, "forward", types.MethodType(forward_that_imports, m)), "never_imported"),
]


@pytest.mark.parametrize(("change", "words"), [each[1:] for each in OPAQUE], ids=[each[0] for each in OPAQUE])
def test_what_cannot_be_seen_through_has_no_key(change: Callable[[Model], object], words: str) -> None:
    model = changed(change)
    assert capture_key(model, *BATCH) is None
    with pytest.raises(NotKeyedError, match=words):
        key_or_reason(model, *BATCH)


def test_hooks_on_all_modules_leave_no_key() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert capture_key(Model(), *BATCH) is None
    finally:
        handle.remove()
    assert capture_key(Model(), *BATCH) is not None


def test_models_of_hugging_face_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}

    def made(**settings: Any) -> nn.Module:
        model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **settings))
        return model

    first = key(made())
    assert key(made()) == first
    assert key(made(activation_function="relu")) != first
    kind = type(made().get_submodule("transformer.h.0.mlp"))
    monkeypatch.setattr(kind, "forward", lambda self, x: self.c_proj(self.c_fc(x)))
    assert key(made()) != first
