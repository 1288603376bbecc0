"""Sends whole weights from the student's GPU to the GPUs of a vLLM server, over NCCL, with vLLM's own weight transfer.

    rank 0          this process, with vLLM's trainer-side class
    other ranks     the server's workers; the server is started with --weight-transfer-config '{"backend": "nccl"}'

Each transfer creates a process group and destroys it, so any rank of the run may send, and a transfer after a fault
starts afresh. NCCL waits without limit for a peer that is gone. A transfer therefore runs in a thread of its own, and
an error answer of the server, or a timeout, shuts the group down from outside.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opd.engine_versions import TESTED
from opd.errors import ConfigError, RolloutEngineError, one_line
from opd.extras import require
from student.rollout.servers.http import Connection, LostError

if TYPE_CHECKING:
    import torch

    from student.rollout.servers.held import HeldWeights
    from student.settings.recipe import Recipe

_BUFFER_BYTES = 2**28
"""Size of each of the two buffers into which tensors are packed, on either side; larger if a tensor is."""
_SENDING = threading.Lock()
"""Serialises the transfers of a process, which share a link and vLLM's CUDA streams."""


def check_transfer(recipe: Recipe, *, merged: bool) -> None:
    """Refuse a recipe whose weights cannot be sent over NCCL.

    Args:
        recipe: the whole recipe.
        merged: whether a LoRA student is sent as merged weights.

    Raises:
        ConfigError: naming the obstacle.
    """
    said = "rollout.engine.transfer nccl"
    if recipe.train.sharding != "none":
        raise ConfigError(
            f"{said} sends the weights from one rank, but no rank of a sharded student (train.sharding: "
            f"{recipe.train.sharding}) holds all of them; set rollout.engine.transfer: folder."
        )
    if recipe.model.lora is not None and not merged:
        raise ConfigError(
            f"{said} sends whole weights, but with model.lora only the adapters are sent; set "
            "rollout.engine.merge_adapters: true, or rollout.engine.transfer: folder."
        )
    require(said, "vllm", "vllm", "set rollout.engine.transfer: folder")


def check_sender(device: torch.device) -> None:
    """Refuse a student that is not on a GPU, or a vLLM that cannot send.

    This imports vLLM, which takes a while, before any server waits for the transfer.

    Raises:
        ConfigError: saying which of the two it is.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"rollout.engine.transfer nccl sends from GPU to GPU, but the student is on {device}; set "
            "rollout.engine.transfer: folder."
        )
    said = f"install vLLM {TESTED['vLLM']} beside the student, or set rollout.engine.transfer: folder"
    try:
        vllm = _Vllm.installed()
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine.transfer nccl lacks a part of vLLM's weight transfer ({error}); {said}."
        ) from error
    if missing := vllm.missing():
        raise ConfigError(
            f"rollout.engine.transfer nccl does not know {', '.join(missing)}, which the weight transfer of this vLLM "
            f"calls; {said}."
        )


@dataclass(frozen=True, slots=True)
class _Vllm:
    """The trainer's side of vLLM's weight transfer.

    Attributes:
        factory: makes transfer engines.
        told: the class of their arguments.
        source: the class of weights to send, which vLLM leaves to others to implement.
        meta: the class of the name, type and shape of a tensor.
        client: the protocol of the calls that a transfer makes to the server.
    """

    factory: Any
    told: Any
    source: Any
    meta: Any
    client: Any

    @classmethod
    def installed(cls) -> _Vllm:
        """That of the vLLM that is installed; raises ImportError if a part is not there."""
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm.distributed import weight_transfer as parts
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        try:
            factory, source = parts.WeightTransferTrainerFactory, parts.WeightSource
            return cls(factory, NCCLTrainerInitInfo, source, parts.ParamMeta, parts.VLLMWeightSyncClient)
        except AttributeError as error:
            raise ImportError(str(error)) from error

    def sources(self) -> Any:
        """Our class of weights to send, `HeldWeights -> WeightSource`, derived from vLLM's own.

        0.32 iterates over the source and calls `metadata`; 0.33 calls `iter_full` and has `metadata` as a property.
        """

        def init(source: Any, weights: HeldWeights) -> None:
            source.weights = weights

        def each(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(source.weights)

        def metadata(source: Any) -> list[Any]:
            return [self.meta(*found) for found in source.weights.found]

        called = callable(getattr(self.source, "metadata", None))
        described = metadata if called else cached_property(metadata)
        ours = {"__init__": init, "__iter__": each, "iter_full": each, "metadata": described}
        return type(self.source)("HeldSource", (self.source,), ours)

    def missing(self) -> list[str]:
        """What vLLM calls and we do not have."""
        calls = {name for name in vars(self.client) if not name.startswith("_")} - {*dir(_Calls)}
        return sorted(calls | self.sources().__abstractmethods__)


def send(weights: HeldWeights, connection: Connection) -> None:
    """Send the weights to a server that is paused.

    Args:
        weights: what to send.
        connection: connection to the server; its time limit also bounds the transfer.

    Raises:
        LostError: if the server does not answer in time.
        RolloutEngineError: if it refuses, or the transfer fails on this side.
    """
    vllm = _Vllm.installed()
    workers = int(connection.call("/get_world_size")["world_size"])
    own = connection.another()
    calls = _Calls(own)
    opened: list[Any] = []

    def work() -> None:
        try:
            address, port = _meeting(own.url)
            init = vllm.told(address, port, workers + 1, packed_buffer_size_bytes=_BUFFER_BYTES, rank=0)
            with _on(weights.device):
                engine = vllm.factory.trainer_init(init, client=calls, source=vllm.sources()(weights))
                opened.append(engine)
                if calls.outcome.done():  # given up meanwhile, so nothing else would shut this group down
                    end()
                else:
                    engine.send_weights()
            calls.settle()
        except BaseException as error:
            calls.settle(error)
        finally:
            own.close()

    def end() -> None:
        with suppress(IndexError):  # either thread may take the group from the list first
            opened.pop().shutdown()

    with _SENDING:
        threading.Thread(target=work, daemon=True).start()
        try:
            calls.outcome.result(own.seconds)
        except TimeoutError as error:
            raise LostError(f"{own.url} did not take the weights within {own.seconds:g} s") from error
        except (LostError, RolloutEngineError):
            raise
        except Exception as error:
            said = one_line(error, 300)
            raise RolloutEngineError(f"the transfer to {own.url} failed ({type(error).__name__}: {said})") from error
        finally:
            calls.settle(LostError(f"the transfer to {own.url} was given up"))
            own.cut()
            end()
    connection.call("/shutdown_weight_transfer_engine", {})


def reset(connection: Connection) -> None:
    """Make a server forget an aborted update; vLLM would refuse the next one, or take it for its continuation."""
    for path in ("/start_weight_update", "/finish_weight_update", "/shutdown_weight_transfer_engine"):
        with suppress(RolloutEngineError):  # starting fails if an update has begun, which is then finished
            connection.call(path, {})


class _Calls:
    """The calls that vLLM's trainer side makes to the server: its `VLLMWeightSyncClient`, with our timeouts and key.

    Attributes:
        outcome: the result of the transfer; an error as soon as a call fails, because NCCL may then wait without limit.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.outcome: Future[None] = Future()

    def settle(self, error: BaseException | None = None) -> None:
        """Set the outcome of the transfer; only the first call has an effect."""
        with suppress(InvalidStateError):
            self.outcome.set_result(None) if error is None else self.outcome.set_exception(error)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("/finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})

    def _call(self, path: str, body: dict[str, Any]) -> None:
        try:
            self._connection.call(path, body)
        except BaseException as error:
            self.settle(error)
            raise


def _meeting(url: str) -> tuple[str, int]:
    """The address at which the group meets: the IPv4 address of this machine towards the server, and a free port."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        # Connecting a datagram socket sends nothing, but selects the local address.
        towards.connect((parts.hostname, parts.port or 80))
        address = str(towards.getsockname()[0])
    with socket.socket() as free:
        free.bind((address, 0))
        return address, int(free.getsockname()[1])


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current device of this thread, from which vLLM sends."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
