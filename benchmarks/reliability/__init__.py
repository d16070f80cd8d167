"""How docs/reliability.md is made: `python -m benchmarks.reliability --help`."""
