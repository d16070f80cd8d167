"""Restoring a checkpoint into live state, on any number of ranks."""
