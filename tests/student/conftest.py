"""Scored rows without a server, shared with the tests of opd_zoo."""

from benches import bench, longrope, toy

__all__ = ["bench", "longrope", "toy"]
