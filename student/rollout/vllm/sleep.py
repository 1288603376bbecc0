"""vLLM's sleep: between rollouts its weights wait in the host's memory, and the GPU's memory is the learner's.

wake     the learner's cache of freed blocks is given back, then vLLM takes its memory: it takes it from the device
         and not from torch's cache, in which the learner's last step has left most of the device
rest     vLLM's weights go to the host, keys and values are dropped
"""

from typing import Any

from student.rollout.lost import EngineLostError


class Sleep:
    """Whether vLLM sleeps, and what has to happen before it may not.

    Args:
        enabled: whether it sleeps at all.

    Attributes:
        asleep: whether it does now.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.asleep = False

    def wake(self, llm: Any) -> None:
        """Have `llm` hold its memory.

        Raises:
            EngineLostError: when it could not; it is of no more use.
        """
        if not self.asleep:
            return
        import torch

        self.asleep = False
        torch.cuda.empty_cache()
        _asked(llm.wake_up, "wake up; lower train.micro_batch_tokens or rollout.cache_tokens if memory is short")

    def rest(self, llm: Any) -> None:
        """Have `llm` give its memory back.

        Raises:
            EngineLostError: when it could not; it is of no more use.
        """
        if self._enabled and not self.asleep:
            _asked(lambda: llm.sleep(level=1), "give the GPU's memory back; leave rollout.engine.sleep out")
            self.asleep = True


def _asked(call: Any, what: str) -> None:
    try:
        call()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
        raise EngineLostError(f"vLLM did not {what} ({reason}).") from error
