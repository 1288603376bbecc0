"""Traces and metrics, for teacher servers and students."""
