"""The student: one training loop, a file per stage that it calls, methods (a paper a file) and RL plug-ins."""
