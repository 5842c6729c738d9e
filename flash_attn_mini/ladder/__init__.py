"""The ladder: one attention, three times over, each rung closer to the machine.

online_softmax.py (PyTorch), minimal_triton.py (Triton), csrc/minimal/flash_attn_minimal.cu (CUDA), and then the
backends. `python -m flash_attn_mini.ladder` runs them and holds each against the reference with verify().
"""

from .online_softmax import online_softmax_attention
from .verify import VerifyReport, verify

__all__ = ["VerifyReport", "online_softmax_attention", "verify"]
