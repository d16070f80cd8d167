"""Markers, claims and waiting: what evaluators and those who wait for them use."""
