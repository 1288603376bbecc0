"""What the vllm engine adds to vLLM's workers, in whichever process they run (vLLM's `worker_extension_cls`)."""

from typing import Any


class OpdWorkerExtension:
    """A base class that vLLM adds to its workers; `LLM.collective_rpc` calls its methods by name."""

    get_model: Any

    def opd_cut_vocabulary(self, size: int) -> int:
        """Keep the first `size` logits of every position, so that vLLM normalises and lists only those.

        vLLM cuts off rows that it added itself to spread the head over devices. This moves that cut, so it costs
        nothing. Returns how many layers of the model compute logits.
        """
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        layers = [module for module in self.get_model().modules() if isinstance(module, LogitsProcessor)]
        for layer in layers:
            layer.org_vocab_size = size
        return len(layers)
