"""Layers that users of the official package import beside the attention functions."""
