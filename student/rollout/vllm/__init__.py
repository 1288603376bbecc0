"""The rollout engine vllm: vLLM in the student's own process.

settings.py has the settings and the checks that need nothing loaded, engine.py turns requests into rows and updates the
weights, adapters.py has vLLM apply adapters instead, launch.py starts and stops vLLM without side effects on this
process, streams.py and draws.py draw tokens inside vLLM, and sleep.py frees its memory between rollouts. Student and
vLLM both score the row of student/rollout/known_row.py after every sync.
"""
