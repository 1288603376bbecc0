"""vLLM's own weight transfer for NCCL, on a CPU: the group speaks gloo, and everything else of it stays as it is.

Both sides run the code of vLLM that they run on GPUs (the handshake, packed tensors in rounds, loading layer by layer);
what is replaced are NCCL's communicator and CUDA's streams, of which a CPU has none. A server is made to by
`--worker-extension-cls gloo_worker.Worker`, a student's process by `install()`.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

_SECONDS = 60.0


class _Stream:
    """A CPU computes in order."""

    def synchronize(self) -> None:
        pass


class Gloo:
    """As much of `PyNcclCommunicator` as transfers use."""

    def __init__(self, address: str, port: int, rank: int, count: int) -> None:
        from torch.distributed import PrefixStore, ProcessGroupGloo
        from vllm.distributed.utils import StatelessProcessGroup

        self._met = StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=count)
        store = PrefixStore("gloo", self._met.store)
        self._group: Any = ProcessGroupGloo(store, rank, count, timedelta(seconds=_SECONDS))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Send it from rank `src`, or receive it there."""
        if self._group is None:
            raise RuntimeError("the group was ended")
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        """The others hear it at their next broadcast."""
        self._group = None


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have this process transfer weights over gloo; `put` sets an attribute."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    def group(address: str, port: int, rank: int, count: int, device: Any) -> Gloo:
        return Gloo(address, port, rank, count)

    put(nccl_common, "stateless_init_process_group", group)
    put(packed_tensor, "_get_streams", lambda device, count: (_Stream(),) * count)
    put(torch.accelerator, "current_device_index", lambda: 0)
    put(torch.accelerator, "synchronize", lambda *device: None)


class SilentServer:
    """Answers as a vLLM server does that is asked to join a group, and does not join.

    Args:
        refuses: whether it says that it will not.
    """

    def __init__(self, refuses: bool) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, b'{"world_size": 1}')

            def do_POST(self) -> None:
                self._answer(500, b"no GPU is left") if refuses else self._answer(200, b"{}")

            def _answer(self, status: int, raw: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()
