"""A real vLLM server on a CPU, as a rollout server and a teacher's server are started."""

import sys
from pathlib import Path

from engine_process import EngineProcess


class VllmServer(EngineProcess):
    """The server, in a process group of its own.

    Args:
        folder: the model it is started on.
        port: to listen on.
        adapters: whether it takes adapters.
        transfer: whether it receives weights over gloo, as it would over NCCL on GPUs; see `gloo_transfer`.
        more: further flags.
    """

    def __init__(self, folder: Path, port: int, *more: str, adapters: bool = True, transfer: bool = False) -> None:
        flags = f"--model {folder} --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 512"
        flags += " --distributed-executor-backend uni --enable-scale-out --logprobs-mode processed_logprobs"
        flags += " --enable-lora --max-lora-rank 8" if adapters else ""
        if transfer:
            flags += ' --weight-transfer-config {"backend":"nccl"} --worker-extension-cls gloo_worker.Worker'
        own = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }
        # `vllm serve` asks for the version of a package that the CPU build names otherwise.
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags.split(), *more]
        super().__init__("vLLM", port, words, own, Path(__file__).parent)
