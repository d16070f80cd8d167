"""The command line: parse, call the core, show."""
