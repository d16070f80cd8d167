"""Entries of a manifest to tensors in memory: where their elements lie, which bytes to read, and how to decode them."""
