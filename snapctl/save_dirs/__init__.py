"""Many save directories: where they are, how each of them stands, and how a monitoring system is told."""
