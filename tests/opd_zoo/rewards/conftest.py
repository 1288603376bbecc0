"""Rows to be rewarded, shared with the tests of student."""

from rewarded import make_row, services

__all__ = ["make_row", "services"]
