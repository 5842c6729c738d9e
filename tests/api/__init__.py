"""Calls as a user and PyTorch see them: arguments, errors, autograd, compilers, transforms."""
