"""Traces and metrics, for both floors above."""
