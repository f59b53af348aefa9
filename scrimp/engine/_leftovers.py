"""What a backward that failed leaves behind: torch keeps the nodes that were still to run in a queue of the calling thread, and
with them the graph and its activations, until another backward takes them out."""

from __future__ import annotations

import torch


class Leftovers:
    """The queue is taken from its newest node to its oldest: the backward of a node that is older than all of the step's takes
    out everything that the step left there."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Before a step's first operator, in the thread that runs its backward."""
        with torch.enable_grad():
            self._oldest = torch.empty(0, requires_grad=True).clone()  # which takes no memory

    def clear(self) -> None:
        torch.autograd.backward(self._oldest, torch.empty(0), retain_graph=True)
