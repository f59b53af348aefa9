"""What the rehearsed steps take of a GPU, by the counters of torch's allocator and of the driver."""

from __future__ import annotations

import torch

from scrimp.rehearsal.result import DeviceMemory


def start_peaks(device: torch.device) -> None:
    """From now on the counters are those of the timed steps. The allocator's cache is emptied, because what earlier steps left
    there would count as reserved."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def device_memory(device: torch.device, live_nbytes: int) -> DeviceMemory | None:
    """Since `start_peaks`; None without a GPU. `live_nbytes`: the peak of the rank's storages."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        live_nbytes=live_nbytes,
        requested_nbytes=torch.cuda.memory_stats(device)["requested_bytes.all.peak"],
        allocated_nbytes=torch.cuda.max_memory_allocated(device),
        reserved_nbytes=torch.cuda.max_memory_reserved(device),
        outside_nbytes=total - free - torch.cuda.memory_reserved(device),
    )
