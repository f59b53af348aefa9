"""Model data in chunks: parameters, gradients and optimizer states on device, host and disk.

In:   the layers of a model with their parameters; a trace of one step.
Out:  a `Store` that fetches, evicts and updates layers; a `Schedule` that says which layers are resident at each step.

    disk  <── spill/ ──>  host arenas  <── transfer/ ──>  device
                              │                              │
                        kernels/host_update           kernels/device_update

Read in this order:

    tables/     where every parameter's elements lie: chunk table, shards of ranks, optimizers as data, codes of 8-bit states
    transfer/   host memory, copies over the link, copy streams, collectives between ranks
    spill/      the file of the disk tier, and the threads that read and write it
    store/      one placement per layer (`Tier`), moving a layer between tiers, sharding all over other ranks, and the `Store`
    kernels/    the fused update: C for the host, Triton for the device, and the trial that compares their bits with torch's
    update/     one parameter's update; the update of layers whose states are streamed through the device
    schedule/   which layers stay resident (eviction), which tier each layer gets (placement_search), by measured rates
    meter/      every byte on the device: an allocation meter for the CPU, the allocator's counters on CUDA
    worker/     the host thread that updates layers while the next step runs

Tests of transfer: tests/engine/test_engine_ranks.py
Tests of update: tests/engine/update/test_streamed_update.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.chunks.kernels.build import load_library
    from scrimp.chunks.kernels.device_update import device_kernel, update_kinds, why_no_device_kernel
    from scrimp.chunks.kernels.fallback import kernel_or_reason, triton_at_hand
    from scrimp.chunks.kernels.host_update import FUSED, KINDS, LEVELS, host_kernel, why_no_host_kernel
    from scrimp.chunks.meter.cpu import CpuMeter
    from scrimp.chunks.meter.cuda import CudaMeter
    from scrimp.chunks.meter.dispatch_private import PlainMode, Unseen, detached
    from scrimp.chunks.meter.protocol import Meter
    from scrimp.chunks.schedule.eviction import Schedule, ScheduleStep, least_fetched_nbytes
    from scrimp.chunks.schedule.occupy_private import occupy
    from scrimp.chunks.schedule.placement_search import Choice, choose_placement
    from scrimp.chunks.schedule.rates import Copies, HostUpdate, device_memory, measure_rates, quickest, settle
    from scrimp.chunks.schedule.step_cost import LayerCost, Rates
    from scrimp.chunks.spill.direct_io import PAGE, open_direct
    from scrimp.chunks.spill.queue import region_requests
    from scrimp.chunks.store.disk_tier import STAGES, block_numel, tile_numel
    from scrimp.chunks.store.placement import DEVICE, DISK, HOST, STREAMED, Opened, Piece, Tier, optimized, placement_nbytes
    from scrimp.chunks.store.regroup import Regrouping
    from scrimp.chunks.store.store import DTYPES, Store
    from scrimp.chunks.tables.optimizers import SGD, AdamW, Optimizer, Patterns, check_optimizer, rate, settings_by_group
    from scrimp.chunks.tables.parameter_settings import Rules
    from scrimp.chunks.tables.regroup import Grouping, regrouped
    from scrimp.chunks.tables.shards import Shards, Spans
    from scrimp.chunks.tables.state_codec import BLOCK, CODECS, Coder, Field, coder_numel, state_fields
    from scrimp.chunks.tables.table import ChunkTable, LayerSpace, Row, Share, Slot, build_table
    from scrimp.chunks.tables.tiling import Tiling
    from scrimp.chunks.transfer.collectives import Wire
    from scrimp.chunks.transfer.copy_streams import Event
    from scrimp.chunks.transfer.host_arena import arena
    from scrimp.chunks.transfer.staged_copy import carry
    from scrimp.chunks.update.streamed import Part, StreamedUpdate, stages_nbytes, update_tiles
    from scrimp.chunks.update.update import Updater, gradient_norm, stage_numel
    from scrimp.chunks.worker.worker import Gate, Worker

__all__ = [
    "BLOCK", "CODECS", "DEVICE", "DISK", "DTYPES", "FUSED", "HOST", "KINDS", "LEVELS", "PAGE", "SGD", "STAGES", "STREAMED",
    "AdamW", "Choice", "ChunkTable", "Coder", "Copies", "CpuMeter", "CudaMeter", "Event", "Field", "Gate", "Grouping",
    "HostUpdate", "LayerCost", "LayerSpace", "Meter", "Opened", "Optimizer", "Part", "Patterns", "Piece", "PlainMode", "Rates",
    "Regrouping", "Row", "Rules", "Schedule", "ScheduleStep", "Shards", "Share", "Slot", "Spans", "Store", "StreamedUpdate",
    "Tier", "Tiling", "Unseen", "Updater", "Wire", "Worker", "arena", "block_numel", "build_table", "carry", "check_optimizer",
    "choose_placement", "coder_numel", "detached", "device_kernel", "device_memory", "gradient_norm", "host_kernel",
    "kernel_or_reason", "least_fetched_nbytes", "load_library", "measure_rates", "occupy", "open_direct", "optimized",
    "placement_nbytes", "quickest", "rate", "region_requests", "regrouped", "settings_by_group", "settle", "stage_numel",
    "stages_nbytes", "state_fields", "tile_numel", "triton_at_hand", "update_kinds", "update_tiles", "why_no_device_kernel",
    "why_no_host_kernel",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "load_library": "scrimp.chunks.kernels.build",
        "device_kernel": "scrimp.chunks.kernels.device_update",
        "update_kinds": "scrimp.chunks.kernels.device_update",
        "why_no_device_kernel": "scrimp.chunks.kernels.device_update",
        "kernel_or_reason": "scrimp.chunks.kernels.fallback",
        "triton_at_hand": "scrimp.chunks.kernels.fallback",
        "FUSED": "scrimp.chunks.kernels.host_update",
        "KINDS": "scrimp.chunks.kernels.host_update",
        "LEVELS": "scrimp.chunks.kernels.host_update",
        "host_kernel": "scrimp.chunks.kernels.host_update",
        "why_no_host_kernel": "scrimp.chunks.kernels.host_update",
        "CpuMeter": "scrimp.chunks.meter.cpu",
        "CudaMeter": "scrimp.chunks.meter.cuda",
        "PlainMode": "scrimp.chunks.meter.dispatch_private",
        "Unseen": "scrimp.chunks.meter.dispatch_private",
        "detached": "scrimp.chunks.meter.dispatch_private",
        "Meter": "scrimp.chunks.meter.protocol",
        "Schedule": "scrimp.chunks.schedule.eviction",
        "ScheduleStep": "scrimp.chunks.schedule.eviction",
        "least_fetched_nbytes": "scrimp.chunks.schedule.eviction",
        "Choice": "scrimp.chunks.schedule.placement_search",
        "choose_placement": "scrimp.chunks.schedule.placement_search",
        "Copies": "scrimp.chunks.schedule.rates",
        "HostUpdate": "scrimp.chunks.schedule.rates",
        "device_memory": "scrimp.chunks.schedule.rates",
        "measure_rates": "scrimp.chunks.schedule.rates",
        "quickest": "scrimp.chunks.schedule.rates",
        "settle": "scrimp.chunks.schedule.rates",
        "occupy": "scrimp.chunks.schedule.occupy_private",
        "LayerCost": "scrimp.chunks.schedule.step_cost",
        "Rates": "scrimp.chunks.schedule.step_cost",
        "PAGE": "scrimp.chunks.spill.direct_io",
        "open_direct": "scrimp.chunks.spill.direct_io",
        "region_requests": "scrimp.chunks.spill.queue",
        "STAGES": "scrimp.chunks.store.disk_tier",
        "block_numel": "scrimp.chunks.store.disk_tier",
        "tile_numel": "scrimp.chunks.store.disk_tier",
        "DEVICE": "scrimp.chunks.store.placement",
        "DISK": "scrimp.chunks.store.placement",
        "HOST": "scrimp.chunks.store.placement",
        "STREAMED": "scrimp.chunks.store.placement",
        "Opened": "scrimp.chunks.store.placement",
        "Piece": "scrimp.chunks.store.placement",
        "Tier": "scrimp.chunks.store.placement",
        "optimized": "scrimp.chunks.store.placement",
        "placement_nbytes": "scrimp.chunks.store.placement",
        "Regrouping": "scrimp.chunks.store.regroup",
        "DTYPES": "scrimp.chunks.store.store",
        "Store": "scrimp.chunks.store.store",
        "SGD": "scrimp.chunks.tables.optimizers",
        "AdamW": "scrimp.chunks.tables.optimizers",
        "Optimizer": "scrimp.chunks.tables.optimizers",
        "Patterns": "scrimp.chunks.tables.optimizers",
        "check_optimizer": "scrimp.chunks.tables.optimizers",
        "rate": "scrimp.chunks.tables.optimizers",
        "settings_by_group": "scrimp.chunks.tables.optimizers",
        "Rules": "scrimp.chunks.tables.parameter_settings",
        "Grouping": "scrimp.chunks.tables.regroup",
        "regrouped": "scrimp.chunks.tables.regroup",
        "Shards": "scrimp.chunks.tables.shards",
        "Spans": "scrimp.chunks.tables.shards",
        "BLOCK": "scrimp.chunks.tables.state_codec",
        "CODECS": "scrimp.chunks.tables.state_codec",
        "Coder": "scrimp.chunks.tables.state_codec",
        "Field": "scrimp.chunks.tables.state_codec",
        "coder_numel": "scrimp.chunks.tables.state_codec",
        "state_fields": "scrimp.chunks.tables.state_codec",
        "ChunkTable": "scrimp.chunks.tables.table",
        "LayerSpace": "scrimp.chunks.tables.table",
        "Row": "scrimp.chunks.tables.table",
        "Share": "scrimp.chunks.tables.table",
        "Slot": "scrimp.chunks.tables.table",
        "Tiling": "scrimp.chunks.tables.tiling",
        "build_table": "scrimp.chunks.tables.table",
        "Wire": "scrimp.chunks.transfer.collectives",
        "Event": "scrimp.chunks.transfer.copy_streams",
        "arena": "scrimp.chunks.transfer.host_arena",
        "carry": "scrimp.chunks.transfer.staged_copy",
        "Part": "scrimp.chunks.update.streamed",
        "StreamedUpdate": "scrimp.chunks.update.streamed",
        "stages_nbytes": "scrimp.chunks.update.streamed",
        "update_tiles": "scrimp.chunks.update.streamed",
        "Updater": "scrimp.chunks.update.update",
        "gradient_norm": "scrimp.chunks.update.update",
        "stage_numel": "scrimp.chunks.update.update",
        "Gate": "scrimp.chunks.worker.worker",
        "Worker": "scrimp.chunks.worker.worker",
    },
)
