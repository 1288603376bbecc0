"""vLLM's sleep mode: between rollouts its weights are kept in host memory, and the learner has the GPU's memory.

wake     torch's cache of freed blocks is released, then vLLM takes its memory; vLLM allocates from the device and not
         from torch's cache, which after a step of the learner holds most of the device
rest     vLLM's weights move to the host; its keys and values are dropped
"""

from typing import Any

from student.rollout.lost import EngineLostError


class Sleep:
    """Puts vLLM to sleep and wakes it up.

    Args:
        enabled: whether sleep mode is used at all.

    Attributes:
        asleep: whether vLLM is asleep.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.asleep = False

    def wake(self, llm: Any) -> None:
        """Wake `llm` up, so that it holds its memory again.

        Raises:
            EngineLostError: if that fails; the engine is then unusable.
        """
        if not self.asleep:
            return
        import torch

        self.asleep = False
        torch.cuda.empty_cache()
        _asked(llm.wake_up, "wake up; lower train.micro_batch_tokens or rollout.cache_tokens if memory is short")

    def rest(self, llm: Any) -> None:
        """Put `llm` to sleep, so that it releases its memory.

        Raises:
            EngineLostError: if that fails; the engine is then unusable.
        """
        if self._enabled and not self.asleep:
            _asked(lambda: llm.sleep(level=1), "free its GPU memory; remove rollout.engine.sleep")
            self.asleep = True


def _asked(call: Any, what: str) -> None:
    try:
        call()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
        raise EngineLostError(f"vLLM did not {what} ({reason}).") from error
