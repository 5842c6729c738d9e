"""Parts of the build: build backend, target environment's torch, selection of kernels, and the kernel cache."""
