"""Hugging Face: weights as a folder that transformers loads.

In:   an engine, or the folder of a checkpoint.
Out:  sharded safetensors files with index, config and tokenizer.

    exports.py          `export`: streams weights into a folder, or into one file
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.ext.hf.exports import export

__all__ = ["export"]

__getattr__ = lazily(
    __name__,
    {
        "export": "scrimp.ext.hf.exports",
    },
)
