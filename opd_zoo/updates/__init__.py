"""Methods that order, replay or measure updates."""
