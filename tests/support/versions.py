"""The version of PyTorch, for tests of what older versions lack."""

from __future__ import annotations

import torch

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
