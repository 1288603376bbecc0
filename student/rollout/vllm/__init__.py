"""The rollout engine vllm: vLLM in the student's own process.

settings.py holds what a recipe may say and the refusals before anything is loaded, engine.py turns requests into rows
and keeps the weights, launch.py starts and ends vLLM without traces in this process, streams.py draws inside vLLM,
weights.py names the student's weights as a checkpoint does. Student and vLLM both read the row of
student/rollout/known_row.py after every sync.
"""
