"""Strategies that sample in rounds."""
