"""Starts and stops vLLM in this process without changing the process's random states, threads and ranks."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from opd.engine_versions import installed_vllm, note_version
from opd.errors import ConfigError, one_line

_kept: list[Any] = []


def prepare() -> None:
    """Set the environment variables that vLLM reads when it is imported; variables that are set already stay.

    They keep the engine in this process, which holds the rows' random streams, select the runner with logits processors
    of the form in `streams`, and keep vLLM from binding the threads that the student computes with.
    """
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if not torch.cuda.is_available():
        # On a CPU compilation costs far more than it saves.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # It would override rollout.cache_tokens.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def alone() -> bool:
    """Whether this process is the only rank."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def start(model: str, options: dict[str, Any]) -> Any:
    """A `vllm.LLM` in this process.

    Raises:
        ConfigError: if vLLM cannot run the model.
    """
    prepare()
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine vllm needs vLLM, which cannot be imported ({error}); install it with pip install "
            "'opd[vllm]'."
        ) from error
    note_version("vLLM", installed_vllm(), "rollout.engine vllm")
    if not torch.cuda.is_available():
        options.setdefault("enforce_eager", True)
    if not alone():
        # The ranks already have a process group, in which each engine forms a group of its own.
        options.setdefault("distributed_executor_backend", "external_launcher")
    try:
        with _untouched():
            return LLM(model, **options)
    except Exception as error:
        reason = one_line(error, 300)
        raise ConfigError(f"vLLM cannot run student {model!r}: {reason}.") from error


def end(llm: Any) -> None:
    """Free what an engine holds; if several ranks share a process group, its memory lives until the process ends.

    vLLM destroys the process group when it shuts down or is garbage-collected, and the ranks still need the group.
    """
    if not alone():
        _kept.append(llm)
        return
    llm.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@contextmanager
def _untouched() -> Iterator[None]:
    """Restore what vLLM changes: it seeds all of the process's generators and, on a CPU, the number of threads."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
