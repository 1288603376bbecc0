"""A real vLLM server on a CPU, as a rollout server is started."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

_READY_SECONDS = 600.0


class VllmServer:
    """The server, in a process group of its own.

    Args:
        folder: the model it is started on.
        port: to listen on.
        adapters: whether it takes adapters.
        transfer: whether it receives weights over gloo, as it would over NCCL on GPUs; see `gloo_transfer`.
    """

    def __init__(self, folder: Path, port: int, *, adapters: bool = True, transfer: bool = False) -> None:
        self.url = f"http://127.0.0.1:{port}"
        flags = f"--model {folder} --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 512"
        flags += " --distributed-executor-backend uni --enable-scale-out --logprobs-mode processed_logprobs"
        flags += " --enable-lora --max-lora-rank 8" if adapters else ""
        if transfer:
            flags += ' --weight-transfer-config {"backend":"nccl"} --worker-extension-cls gloo_worker.Worker'
        own = {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        # `vllm serve` asks for the version of a package that the CPU build names otherwise.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags.split()],
            env={**os.environ, **own},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + _READY_SECONDS
        while True:
            if self._process.poll() is not None or time.monotonic() > until:
                self._log.seek(0)
                raise RuntimeError(f"vLLM did not start: {self._log.read().decode(errors='replace')[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    def kill(self) -> None:
        """As a machine that fails."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it and whatever it started."""
        if self._process.poll() is None:
            self.kill()
        self._log.close()
