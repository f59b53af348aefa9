"""`Trainer`: `transformers.Trainer` within a memory budget."""

from __future__ import annotations

import transformers

from scrimp.ext.hf.within_budget import WithinBudget

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"scrimp.ext.hf works with transformers 5, and {transformers.__version__} is installed: pip install -U transformers"
    )


class Trainer(WithinBudget, transformers.Trainer):
    """`transformers.Trainer` with the keywords of `WithinBudget`: `Trainer(model, args, ..., memory="24GiB")`."""
