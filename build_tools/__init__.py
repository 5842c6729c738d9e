"""What setup.py is made of: the target environment's torch, the build selection, and the kernel cache."""
