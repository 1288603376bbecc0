"""Offline tools for tables of prompts."""
