"""Objectives and methods of distillation papers."""
