"""RL plug-ins: reward-driven terms of the objective, a file each."""
