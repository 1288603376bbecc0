"""Distillation objectives and what changes their rows: a paper a file."""
