"""A real SGLang server on a CPU; see scripts/sglang.sh for what it takes."""

import sys
from pathlib import Path

from engine_process import EngineProcess

_STAND_INS = Path(__file__).with_name("sglang_stand_ins")


class SglangServer(EngineProcess):
    """The server, in a process group of its own.

    Args:
        folder: the model it is started on.
        port: to listen on.
        flags: further flags.
    """

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        usual = f"--model-path {folder} --host 127.0.0.1 --port {port} --device cpu --dtype float32"
        usual += " --attention-backend torch_native --disable-overlap-schedule --disable-cuda-graph"
        usual += " --max-total-tokens 4096 --max-running-requests 8 --skip-server-warmup --grammar-backend none"
        own = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "sglang.launch_server", *usual.split(), *flags]
        super().__init__("SGLang", port, words, own, _STAND_INS)
