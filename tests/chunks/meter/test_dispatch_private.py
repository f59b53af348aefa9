"""What is asked of torch's dispatch by private names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scrimp.chunks.meter import dispatch_private
from scrimp.chunks.meter.dispatch_private import PlainMode, Unseen


class Heard(PlainMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_names_are_there() -> None:
    assert dispatch_private.AVAILABLE
    assert Heard.__torch_dispatch__.__qualname__ == "Heard.__torch_dispatch__"  # not what torch would wrap it in
    assert Heard.__torch_dispatch__.__code__.co_filename == __file__


@pytest.mark.parametrize("available", [True, False])
def test_what_is_not_seen(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_private, "AVAILABLE", available)
    weight = torch.ones(2, requires_grad=True)
    with Heard() as heard:
        weight.mul(2)
        with Unseen():
            assert not weight.mul(3).requires_grad
            weight.add(3)
        assert weight.sub(2).requires_grad
    assert heard.names == ["mul", "sub"]


@pytest.mark.parametrize("available", [True, False])
def test_it_ends_with_an_error_too(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_private, "AVAILABLE", available)
    with Heard() as heard:
        with pytest.raises(ValueError, match="inside"), Unseen():
            raise ValueError("inside")
        torch.ones(2)
    assert heard.names == ["ones"]
    assert torch.is_grad_enabled()
