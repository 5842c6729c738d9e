"""The documents and docstrings."""
