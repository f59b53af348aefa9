"""`Trainer`: `transformers.Trainer` within a memory budget."""

from __future__ import annotations

import transformers

from scrimp.ext.hf.within_budget import WithinBudget


class Trainer(WithinBudget, transformers.Trainer):
    """`transformers.Trainer` with the keywords of `WithinBudget`: `Trainer(model, args, ..., memory="24GiB")`."""
