"""Retention: rules to a plan with reasons, and the deletion that carries it out."""
