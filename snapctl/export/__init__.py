"""Tensors into files and numbers that other programs read."""

FORMATS = ("safetensors", "npy", "pt")
"""Suffixes of the files that can be written."""
