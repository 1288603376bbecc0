"""Mappings from rewards to credit."""
