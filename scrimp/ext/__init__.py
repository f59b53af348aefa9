"""Interoperation with other tools, and a pool of local ranks. Import the module that you need.

In:   models and tensors of other tools (DistributedDataParallel, DTensor). Out:  the same, exchanged or redistributed by scrimp.

    ddp.py            `sparse_hook`: sparse exchange in torch's DistributedDataParallel
    hf/               `hf.export`: weights as a Hugging Face folder
    dtensor.py        `redistribute`: moves for torch's DTensor
    dtensor_plans.py  DTensor's own redistribution plans, for comparisons
    ranks.py          a pool of local gloo processes, for tests, benchmarks and the demo
"""
