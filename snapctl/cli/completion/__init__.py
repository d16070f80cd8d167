"""Completion of command lines: what could be typed next, and the scripts that ask for it in bash, zsh and fish."""

REQUEST = "__complete"
"""The first argument of a command line that asks what could be typed next."""
