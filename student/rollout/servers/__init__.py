"""Rollout engines that are servers beside the student, shared by all ranks: vLLM's and SGLang's, over HTTP.

settings.py holds what a recipe may say, dialect.py what a server is asked for and vllm.py and sglang.py how each is
asked, http.py a connection, folder.py the weights on disk that servers load from, server.py one server with the weights
it holds, crowd.py rows over all servers, engine.py the rollout engine.
"""
