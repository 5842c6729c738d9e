"""Parts of the build: build backend, target torch, what to build, the kernel cache, and the wheel of kernels."""
