"""The ladder: the same attention in several rungs, each closer to the machine.

naive.py and online_softmax.py (PyTorch), minimal_triton.py (Triton), csrc/minimal/flash_attn_minimal.cu (CUDA); the
backends follow. `python -m flash_attn_mini.ladder` runs the rungs and compares each with the reference by verify().
"""

from .naive import naive_attention
from .online_softmax import online_softmax_attention
from .verify import VerifyReport, verify

__all__ = ["VerifyReport", "naive_attention", "online_softmax_attention", "verify"]
