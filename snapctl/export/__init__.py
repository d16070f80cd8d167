"""Tensors into files and numbers that other programs read."""
