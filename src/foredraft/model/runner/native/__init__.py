"""Forward passes by the project's own C kernels for CPUs (kernels/kernels.c)."""
