"""Rows to be rewarded, shared with the tests of opd_zoo."""

from rewarded import make_row, services

__all__ = ["make_row", "services"]
