"""Policy losses and losses on given answers."""
