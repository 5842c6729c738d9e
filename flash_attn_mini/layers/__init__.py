"""Layers of the official package that go with attention: rotary embedding."""
