"""Is a checkpoint whole, and would it restore? Problems are values."""
