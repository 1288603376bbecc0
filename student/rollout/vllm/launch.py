"""Start and end vLLM in this process, and leave the process as it was: its random states, threads and ranks."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from opd.errors import ConfigError, one_line

_kept: list[Any] = []


def prepare() -> None:
    """The environment that vLLM reads when it is imported; what is set already stays.

    The engine runs in this process (its rows' streams are here), on the runner that has logits processors in the form
    of `streams`, and does not bind the threads that the student computes with.
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
    # It would go before rollout.cache_tokens.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def alone() -> bool:
    """Whether this process is the only rank."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def start(model: str, options: dict[str, Any]) -> Any:
    """A `vllm.LLM` in this process.

    Raises:
        ConfigError: when vLLM cannot run the model.
    """
    prepare()
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(f"rollout.engine vllm needs vLLM ({error}); pip install 'opd[vllm]'.") from error
    if not torch.cuda.is_available():
        options.setdefault("enforce_eager", True)
    if not alone():
        # The ranks have a process group already: each engine is a group of its own in it.
        options.setdefault("distributed_executor_backend", "external_launcher")
    try:
        with _untouched():
            return LLM(model, **options)
    except Exception as error:
        reason = one_line(error, 300)
        raise ConfigError(f"vLLM cannot run student {model!r}: {reason}.") from error


def end(llm: Any) -> None:
    """Free what it holds; where several ranks share a process group, only with the process.

    vLLM takes the process group down with itself, also when it is collected as garbage, and the ranks still need it.
    """
    if not alone():
        _kept.append(llm)
        return
    llm.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@contextmanager
def _untouched() -> Iterator[None]:
    """As before: vLLM seeds every generator of the process and, on a CPU, takes `torch.set_num_threads` away."""
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
