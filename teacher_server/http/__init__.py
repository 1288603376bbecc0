"""The HTTP door: the same Score calls for trainers that speak to vLLM's or SGLang's server.

A request becomes a `ScoreRequest` and goes the way of every call (`teacher_server.calls`); the routes only translate.
Needs the extra `http`, which is imported when the door is opened.
"""
