"""Tests of GPUs, and of the kernels for Hopper."""
