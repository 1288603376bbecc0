"""The setting of torch's CUDA allocator that both sides run with."""

import os

_NAME, _VALUE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


def grow_segments(*, pools: bool) -> None:
    """Let segments of GPU memory grow, as passes of ever new shapes would fragment them; before torch is imported.

    A setting that is there stays.

    Args:
        pools: whether this process makes memory pools, as vLLM's sleep mode does, which such segments cannot be in.
    """
    if pools and os.environ.get(_NAME) == _VALUE:  # from the process that started this one
        del os.environ[_NAME]
    elif not pools and "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault(_NAME, _VALUE)
