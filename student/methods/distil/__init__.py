"""Distillation objectives, and controllers that change their rows; one file per paper."""
