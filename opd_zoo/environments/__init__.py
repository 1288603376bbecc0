"""Environments that need a package, a download or a chat model."""
