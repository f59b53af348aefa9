"""`weights=` of DCP folders: the values that DCP saved, and hostile metadata refused without running anything of it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from scrimp import Engine, zoo
from scrimp.engine.sources import dcp_private
from scrimp.errors import RunError
from scrimp.ext.ranks import pool
from tests.checkpoint import rank_jobs as jobs

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*assuming the intent", "ignore::FutureWarning"
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("gpt-tiny")


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        empty = zoo.build("gpt-tiny")
    engine = Engine(empty, weights=folder, memory="1GiB", precision="fp32", device="cpu")
    state = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("form", ["bare", "model", "nested"])
def test_the_values_are_those_that_were_saved(form: str, tmp_path: Path) -> None:
    saved = model()
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(*zoo.example_batch("gpt-tiny", 2)).backward()
    optimizer.step()
    state: dict[str, Any] = {
        "bare": saved.state_dict(),
        "model": {"model": saved.state_dict(), "optimizer": optimizer.state_dict(), "step": 5},
        "nested": {"app": {"model": saved.state_dict(), "seed": torch.ones(1)}},
    }[form]
    dcp.save(state, checkpoint_id=tmp_path)
    found, want = loaded(tmp_path), saved.state_dict()
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.full
def test_parts_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    pool(2).run(jobs.save_dcp, "gpt-tiny", str(tmp_path), timeout_seconds=120)
    found, want = loaded(tmp_path), model().state_dict()
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    assert all(torch.equal(found[name], want[name]) for name in want)


class Hostile:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch {}"),
        (eval, "open('{}', 'w')"),
        (Path.touch, "{}"),
        (torch.load, "{}"),
        (getattr, "{}", "upper"),
        (torch.save, "x", "{}"),
        (nn.Linear, 2, 2),
    ],
    ids=lambda call: call[0].__qualname__,
)
def test_hostile_metadata_runs_nothing(call: Any, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    args = tuple(arg.format(proof) if isinstance(arg, str) else arg for arg in call[1:])
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(call[0], *args)))
    with pytest.raises(RunError, match=r"no metadata of DCP that can be read: it names \S+, which is no class of DCP"):
        loaded(folder)
    assert not proof.exists()


def test_a_hostile_tensor_runs_nothing(tmp_path: Path) -> None:
    dcp.save(model().state_dict(), checkpoint_id=tmp_path)
    found = dcp_private.DcpFolder(tmp_path)
    name, (_, chunks) = next(iter(found._chunks.items()))
    data = pickle.dumps(Hostile(os.system, f"touch {tmp_path / 'proof'}"))
    path = chunks[0].path
    content = bytearray(path.read_bytes())
    content[chunks[0].start : chunks[0].start + len(data)] = data
    path.write_bytes(content)
    with pytest.raises(RunError, match=rf"{name} cannot be read from"):
        found.read(name)
    assert not (tmp_path / "proof").exists()


def place(meta: Any) -> Any:
    """Of the bytes of the first tensor."""
    return next(iter(meta.storage_data.values()))


def row(meta: Any) -> Any:
    return next(iter(meta.state_dict_metadata.values()))


CHANGES = [
    (lambda meta: setattr(place(meta), "relative_path", "../__0_0.distcp"), "which is not in the folder"),
    (lambda meta: setattr(place(meta), "length", -1), "are no sizes"),
    (lambda meta: setattr(place(meta), "transform_descriptors", ["zstd"]), r"transformed by \['zstd'\]"),
    (lambda meta: setattr(row(meta), "size", torch.Size([1 << 40, *row(meta).size[1:]])), "have other elements"),
    (lambda meta: meta.state_dict_metadata.update(more=5), "no metadata of DCP that can be read"),
    (lambda meta: meta.storage_data.clear(), "no metadata of DCP that can be read"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_metadata_that_makes_no_sense_is_refused(change: Any, words: str, tmp_path: Path) -> None:
    dcp.save(model().state_dict(), checkpoint_id=tmp_path)
    meta = pickle.loads((tmp_path / ".metadata").read_bytes())
    change(meta)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(meta))
    with pytest.raises(RunError, match=words):
        loaded(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    dcp.save(model().state_dict(), checkpoint_id=tmp_path)
    path = next(tmp_path.glob("*.distcp"))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(RunError, match=r"__0_0\.distcp is damaged: \S+ ends at byte"):
        loaded(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80")
    with pytest.raises(RunError, match="is no metadata of DCP"):
        loaded(tmp_path)


def test_the_classes_of_dcp_are_the_ones_that_are_known(tmp_path: Path) -> None:
    """Private: says when torch's metadata names others."""
    dcp.save({"model": model().state_dict(), "step": 1}, checkpoint_id=tmp_path)
    names = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.add((module.partition(".")[0], name))
            return super().find_class(module, name)

    with (tmp_path / ".metadata").open("rb") as file:
        Listing(file).load()
    others = {"_StorageInfo", "_get_layout", "Size", "float32", "PosixPath"}
    assert {name for _, name in names} <= dcp_private.METADATA_CLASSES | others
