"""Rollouts: engines that sample the student's responses."""
