"""Data: the order of samples, streams, every kind of source, and the part of a batch that a rank takes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import RunError, ScrimpError
from scrimp.train.config.sections import DataSection
from scrimp.train.data.batches import Batches, Split, even_rows, planned_rows
from scrimp.train.data.order import Order
from scrimp.train.data.sources import open_data
from scrimp.train.data.stream import Sequences, Stream

WORDS = "Sharding is chosen by an integer program. " * 20


@given(samples=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_an_epoch_has_every_sample_once(samples: int, seed: int, epoch: int) -> None:
    order = Order(samples=samples, seed=seed)
    assert sorted(order.at(number) for number in range(epoch * samples, (epoch + 1) * samples)) == [*range(samples)]


def test_the_order_depends_on_seed_and_epoch_and_stays_as_it_is() -> None:
    order = Order(samples=10, seed=0)
    first, second = order.step(0, 10), order.step(1, 10)
    assert first != second
    assert first != Order(samples=10, seed=1).step(0, 10)
    assert first == [order.at(k) for k in range(10)]
    assert order.step(3, 7) == [order.at(k) for k in range(21, 28)]  # across the border of an epoch
    assert first == PINNED  # another order would change every resumed run
    spread = [Order(samples=1 << 20, seed=5).at(k) for k in range(1000)]
    assert abs(np.mean(spread) / (1 << 20) - 0.5) < 5 * (1 / 12) ** 0.5 / 1000**0.5  # five standard errors of uniform numbers


PINNED = [2, 1, 8, 9, 6, 7, 4, 5, 0, 3]


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_a_stream_joins_arrays(sizes: list[int], data: st.DataObject) -> None:
    arrays = [np.arange(size, dtype=np.uint16) + 100 * k for k, size in enumerate(sizes)]
    whole, stream = np.concatenate(arrays).astype(np.int64), Stream(arrays)
    assert len(stream) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert stream.read(start, stop).tolist() == whole[start:stop].tolist()


def test_sequences_with_and_without_a_shift() -> None:
    stream = Stream([np.arange(10)])
    assert len(Sequences(stream, 3, shifted=True)) == 3
    inputs, targets = Sequences(stream, 3, shifted=True)[2]
    assert (inputs.tolist(), targets.tolist()) == ([6, 7, 8], [7, 8, 9])
    assert len(Sequences(stream, 5, shifted=False)) == 2
    assert len(Sequences(stream, 5, shifted=True)) == 1
    assert Sequences(stream, 5, shifted=False)[1]["labels"].tolist() == [5, 6, 7, 8, 9]


def opened(seq: int = 8, vocab: int | None = 256, tokenizer: str = "bytes", **keys: Any) -> Any:
    return open_data(DataSection(**keys), tokenizer, seq, vocab, shifted=True)


def test_text_files_by_pattern(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first é")
    (tmp_path / "empty.txt").write_text("")
    samples = opened(seq=4, text=(str(tmp_path / "*.txt"),))
    whole = b"first \xc3\xa9\0second\0"
    assert len(samples) == (len(whole) - 1) // 4
    assert bytes(torch.cat([samples[k][0] for k in range(3)]).tolist()) == whole[:12]


def test_files_of_tokens(tmp_path: Path) -> None:
    tokens = np.arange(200) * 300
    np.save(tmp_path / "a.npy", tokens.astype(np.int32))
    tokens.astype("<u2").tofile(tmp_path / "b.bin")
    (tmp_path / "b.json").write_text(json.dumps({"dtype": "uint16"}))
    tokens.astype("<u4").tofile(tmp_path / "c.bin")
    for keys in ({"tokens": ("a.npy",)}, {"tokens": ("b.bin",)}, {"tokens": ("c.bin",), "dtype": "uint32"}):
        placed = {**keys, "tokens": tuple(str(tmp_path / name) for name in keys["tokens"])}
        assert opened(vocab=None, **placed)[3][1].tolist() == tokens[25:33].tolist()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"text": ("none.txt",)}, r"\[data\] text: there is no file .*none.txt"),
        ({"tokens": ("c.bin",)}, r"c.bin has no header: set \[data\] dtype, one of uint8, .* or write c.json"),
        ({"tokens": ("odd.bin",), "dtype": "uint16"}, r"odd.bin has 3 bytes, which is no multiple of the 2 bytes of uint16"),
        ({"tokens": ("b.bin",), "dtype": "uint32"}, r"dtype is 'uint32', and b.json says 'uint16'; leave out one"),
        ({"tokens": ("two.npy",)}, r"two.npy has int64 of shape \(2, 2\): a file of tokens has whole numbers in one dim"),
        ({"tokens": ("short.txt",)}, r"ends in .npy or .bin; text files go to \[data\] text"),
        ({"text": ("short.txt",)}, r"3 tokens in 1 text file, and a sequence is 9: give more data"),
        ({"text": ("short.txt",), "vocab": 64}, r"the tokenizer has 256 tokens, and the model's vocabulary 64"),
        ({"tokens": ("v.bin",), "vocab": 64}, r"v.json: vocab is 100, and the model's vocabulary 64"),
        ({"text": ("short.txt",), "tokenizer": "nowhere"}, r"\[tokenizer\] name is 'nowhere': give 'bytes', or a folder"),
        ({"text": ("short.txt",), "seq": None}, r"\[data\] seq is not set"),
        ({"function": "no_such_module_here:make"}, r"no_such_module_here:make: ModuleNotFoundError"),
    ],
)
def test_wrong_data(keys: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b", "c", "v"):
        np.arange(50, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    (tmp_path / "b.json").write_text('{"dtype": "uint16"}')
    (tmp_path / "v.json").write_text('{"dtype": "uint16", "vocab": 100}')
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "short.txt").write_text("ab")
    np.save(tmp_path / "two.npy", np.ones((2, 2), dtype=np.int64))
    with pytest.raises(ScrimpError, match=words):
        opened(**keys)


def test_a_dataset_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["one two", "three"]}).save_to_disk(tmp_path / "text")
    samples = opened(seq=6, dataset=str(tmp_path / "text"))
    assert bytes(samples[0][1].tolist()) == b"ne two"
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6, 7]]}).save_to_disk(tmp_path / "ids")
    assert opened(seq=6, dataset=str(tmp_path / "ids"))[0][1].tolist() == [2, 3, 4, 5, 6, 7]
    with pytest.raises(ScrimpError, match=r"column is 'words'; .* has the columns text"):
        opened(dataset=str(tmp_path / "text"), column="words")
    with pytest.raises(ScrimpError, match="is no folder of save_to_disk"):
        opened(dataset=str(tmp_path))


def test_a_tokenizer_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "</s>": 1, "one": 2, "two": 3, "three": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="[UNK]").save_pretrained(
        tmp_path / "t"
    )
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "b.txt").write_text("three one one")
    samples = opened(seq=6, vocab=5, tokenizer=str(tmp_path / "t"), text=(str(tmp_path / "*.txt"),))
    assert samples[0][0].tolist() == [2, 3, 1, 4, 2, 2]
    with pytest.raises(ScrimpError, match="the tokenizer has 5 tokens, and the model's vocabulary 4"):
        opened(seq=6, vocab=4, tokenizer=str(tmp_path / "t"), text=(str(tmp_path / "*.txt"),))


def test_the_ranks_of_a_step_have_the_whole_batch() -> None:
    samples = Sequences(Stream([np.arange(401)]), 4, shifted=True)
    batches = Batches(samples, Split.of(len(samples), 0.2, 8), batch=8, seed=3)
    assert (batches.split.training, batches.split.held_out, batches.validations) == (80, 20, 2)
    whole = batches.training(5, slice(0, 8))
    for world in (1, 2, 4):
        parts = [batches.training(5, even_rows(8, rank, world)) for rank in range(world)]
        assert all(torch.equal(torch.cat([part[k] for part in parts]), whole[k]) for k in range(2))
    assert batches.validation(1, slice(0, 8))[0][0].tolist() == [4 * 88, 4 * 88 + 1, 4 * 88 + 2, 4 * 88 + 3]
    with pytest.raises(RunError, match=r"\[train\] batch is 8, which 3 ranks do not divide: set it to a multiple of 3"):
        even_rows(8, 0, 3)


def test_too_few_samples() -> None:
    with pytest.raises(ScrimpError, match=r"share = 0.05 of 100 samples are 5, and a batch is 8"):
        Split.of(100, 0.05, 8)
    with pytest.raises(ScrimpError, match="the data have 7 samples to train on, and a batch is 8"):
        Split.of(7, 0, 8)


def test_rows_under_a_plan() -> None:
    def part(*index: tuple[int, int]) -> Any:
        return SimpleNamespace(of=(8, 4)[: len(index)], index=tuple(slice(*each) for each in index))

    assert planned_rows({"a": part((2, 4), (0, 4)), "b": part((2, 4))}, 8) == slice(2, 4)
    every = slice(0, 8)
    assert planned_rows({"a": part((2, 4), (0, 2))}, 8) == every
    assert planned_rows({"a": part((2, 4)), "b": part((4, 6))}, 8) == every
    assert planned_rows({"a": part((2, 4)), "b": part((0, 8))}, 8) == every
    assert planned_rows({"a": SimpleNamespace(of=(8,), index=None)}, 8) == every
