"""What a choice of classes costs: seconds of a step, from its work and the machine's rates.

Where copies and updates run beside compute (`overlapped`), a step takes the longest of

    compute          forward, backward, recomputation, and updates on the device
    the link         weights up, gradients down, and masters and states that pass, each way
    host memory      what the host's update reads and writes, and every byte that crosses the link, over the host's rate

If gradients are judged before any update, there are two such parts: backward with its copies down; then updates, copies up
and the next forward. Without overlap it is the sum of all.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED = 0.6  # of the link's rate is left for states that pass, while the host's update wants the same memory
TIE = 1e-3  # of equal steps the one that does less


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second: over the link up and down, and touched by an update on the host and on the device."""

    up: float
    down: float
    host: float
    device: float


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer: what it takes on the device, and what more to have its home there; bytes of gradients that go home and
    that an update touches; bytes and seconds of its activations, if they can be computed again."""

    nbytes: int
    home_nbytes: int
    down_nbytes: int
    update_nbytes: int
    kept_nbytes: int = 0
    again_seconds: float = 0.0
    recomputable: bool = False
    movable: bool = True  # its home may be the device
    fixed: bool = False  # its home is the device: the host has no room for it
    passable: bool = False  # its masters and states may pass through the device, `home_nbytes` of them


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of a step. `passed_nbytes` go up and come down again."""

    forward_seconds: float
    backward_seconds: float
    up_nbytes: float
    down_nbytes: float
    passed_nbytes: float
    host_nbytes: float
    device_nbytes: float


def seconds(work: Work, rates: Rates, *, overlapped: bool, judged: bool) -> float:
    device = work.device_nbytes / rates.device
    up, down = work.up_nbytes / rates.up, work.down_nbytes / rates.down
    passed_up, passed_down = work.passed_nbytes / (SHARED * rates.up), work.passed_nbytes / (SHARED * rates.down)
    crossing = work.up_nbytes + 2 * work.passed_nbytes
    host = work.host_nbytes / rates.host
    everything = work.forward_seconds + work.backward_seconds + device + up + down + passed_up + passed_down + host
    if not overlapped:
        return everything
    forward = work.forward_seconds + device
    if judged:
        before = max(work.backward_seconds, down)
        after = max(forward, up + passed_up, passed_down, host + crossing / rates.host)
        return before + after + TIE * everything
    memory = host + (crossing + work.down_nbytes) / rates.host
    return max(forward + work.backward_seconds, up + passed_up, down + passed_down, memory) + TIE * everything
