"""Interoperation with other tools, and a pool of local ranks. Import the module that you need.

In:   models, tensors, optimizers and trainers of other tools. Out:  the same, trained, exchanged or redistributed by scrimp.

    hf/               Hugging Face's Trainer within a memory budget, also TRL's and your own; `export`
    optim.py          `optimizer_of`: torch's optimizers as scrimp's
    ddp.py            `sparse_hook`: sparse exchange in torch's DistributedDataParallel
    lightning/        `Budget`: Lightning's Trainer within a memory budget
    dtensor.py        `redistribute`: moves for torch's DTensor
    dtensor_plans.py  DTensor's own redistribution plans, for comparisons
    ranks.py          a pool of local gloo processes, for tests, benchmarks and the demo
"""
