"""Rollout engines that sample with separate vLLM or SGLang servers over HTTP, shared by all ranks.

settings.py has the settings of a recipe, dialect.py the calls that a server must support, vllm.py and sglang.py their
form for each kind of server, http.py a connection, answer_check.py the check of each row, folder.py the weights on disk
that servers load, server.py one server and the weights it holds, pool.py all servers together, crowd.py the
distribution of rows over servers, and engine.py the rollout engine.
"""
