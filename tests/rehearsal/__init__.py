"""The rehearsal: the GPU's path on a pretended CUDA device, on a machine without a GPU.

`python -m pytest -p tests.rehearsal.plugin [--gpus 2] FILES` replaces PyTorch's CUDA by fakes in that process:

- `guard`      tells a CPU build of PyTorch that there are devices (guard.cpp, compiled once)
- `ledger`     counts what a GPU would make the host wait for, and what the host launches, by line
- `tensors`    a tensor that says "cuda:0" and holds a CPU tensor; operators on it, after CUDA's device rules are checked;
               copies between host and device: pageable or pinned, waiting or not
- `graphs`     CUDA graphs: recorded with the host's numbers in them, their pool spoilt after each replay
- `streams`    streams, events, the current device of a thread
- `orders`     orders of additions that follow from what they do in PyTorch's CUDA kernels
- `pretending` puts the fakes in their places

What it cannot see: kernels' arithmetic and speed, races of streams, the allocator, cuBLAS, cuDNN, Triton.
"""
