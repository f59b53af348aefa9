"""Predicts the seconds of a step from its work and the machine's rates.

Where copies and updates overlap with compute (`overlapped`), a step takes the longest of

    compute          forward, backward, recomputation, and updates on the device
    the link         weights up, gradients down, and streamed masters and states, each way
    host memory      what the host's update reads and writes, over the rate that it reaches during those copies; streamed bytes
                     reduce that rate

If gradients are checked before any update, there are two such parts: backward with its copies down; then updates, copies up and
the next forward. Without overlap it is the sum of all.
"""

from __future__ import annotations

from dataclasses import dataclass

TIE = 1e-3  # weight of the total work, to break ties


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second: over the link up and down, and touched by an update on the host and on the device. `shared`: over the
    link, each way, while the host updates; each streamed byte then costs the update `price` of its own bytes. Nothing is
    streamed while these are unknown."""

    up: float
    down: float
    host: float
    device: float
    shared: float = 0.0
    price: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer: its bytes on the device, and the additional bytes if it is placed there; bytes of gradients that go down and
    bytes that an update touches; bytes and seconds of its activations, if they can be recomputed."""

    nbytes: int
    placement_nbytes: int
    down_nbytes: int
    update_nbytes: int
    kept_nbytes: int = 0
    again_seconds: float = 0.0
    recomputable: bool = False
    movable: bool = True  # it may be placed on the device
    fixed: bool = False  # it is placed on the device, because the host has no room for it
    passable: bool = False  # its update may be streamed: `placement_nbytes` of masters and states


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a step. `passed_nbytes` are streamed: they go up and come down again."""

    forward_seconds: float
    backward_seconds: float
    up_nbytes: float
    down_nbytes: float
    passed_nbytes: float
    host_nbytes: float
    device_nbytes: float


def seconds(work: Work, rates: Rates, *, overlapped: bool, checked: bool) -> float:
    device = work.device_nbytes / rates.device
    up, down = work.up_nbytes / rates.up, work.down_nbytes / rates.down
    passed = work.passed_nbytes / rates.shared if work.passed_nbytes else 0.0
    host = (work.host_nbytes + rates.price * work.passed_nbytes) / rates.host
    everything = work.forward_seconds + work.backward_seconds + device + up + down + 2 * passed + host
    if not overlapped:
        return everything
    forward = work.forward_seconds + device
    if checked:
        return max(work.backward_seconds, down) + max(forward, up + passed, host) + TIE * everything
    return max(forward + work.backward_seconds, up + passed, down + passed, host) + TIE * everything
