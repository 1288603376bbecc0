"""Whole weights from the student's GPU to those of a vLLM server, over NCCL, by vLLM's own weight transfer.

    rank 0       this process, by the side that vLLM has for trainers
    the others   the server's workers; it is started with --weight-transfer-config '{"backend": "nccl"}'

Each transfer makes a group and ends it: whichever rank of the run comes first may send, and after a fault the next one
starts afresh. NCCL waits without limit for a peer that is gone. So a transfer runs in a thread of its own, and an
error that the server answers, or the time, ends the group from outside.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opd.errors import ConfigError, RolloutEngineError, one_line
from student.rollout.servers.http import Connection, LostError

if TYPE_CHECKING:
    import torch

    from student.recipe import Recipe
    from student.rollout.servers.held import HeldWeights
    from student.rollout.servers.settings import ServersSettings

_BUFFER_BYTES = 2**28
"""Of each of the two buffers in which tensors are packed, on either side; more where a tensor is larger."""
_SENDING = threading.Lock()
"""Transfers of a process go one after the other: they would share a link, and vLLM's streams."""


def check_transfer(settings: ServersSettings, recipe: Recipe, *, merged: bool) -> None:
    """Refuse what cannot be sent over NCCL.

    Args:
        settings: of an engine for vLLM.
        recipe: the whole one.
        merged: whether a LoRA student is sent as whole weights.

    Raises:
        ConfigError: naming what stands against it.
    """
    said = "rollout.engine.transfer nccl"
    if recipe.train.sharding != "none":
        raise ConfigError(
            f"{said} sends from one rank, and no rank of a sharded student (train.sharding: {recipe.train.sharding}) "
            "holds all weights; set rollout.engine.transfer: folder."
        )
    if recipe.model.lora is not None and not merged:
        raise ConfigError(
            f"{said} sends whole weights, and model.lora sends its adapters alone; set rollout.engine.merge_adapters: "
            "true, or rollout.engine.transfer: folder."
        )
    if find_spec("vllm") is None:
        raise ConfigError(
            f"{said} sends with vLLM, which is not installed beside the student; install it with pip install "
            "'opd[vllm]', or set rollout.engine.transfer: folder."
        )


def check_sender(device: torch.device) -> None:
    """Refuse a student that is not on a GPU and a vLLM that cannot send; imports vLLM before a server waits for it.

    Raises:
        ConfigError: saying which.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"rollout.engine.transfer nccl sends from GPU to GPU, and the student is on {device}; set "
            "rollout.engine.transfer: folder."
        )
    try:
        _vllm()
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine.transfer nccl needs vLLM 0.32 or newer beside the student ({error}); pip install "
            "'opd[vllm]', or set rollout.engine.transfer: folder."
        ) from error


def _vllm() -> tuple[Any, Any]:
    """The factory of vLLM's trainer side, and the type of what it is told."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return WeightTransferTrainerFactory, NCCLTrainerInitInfo


def send(weights: HeldWeights, connection: Connection) -> None:
    """Have a server that samples nothing now receive the weights.

    Args:
        weights: what to send.
        connection: to the server; its timeout is that of the transfer.

    Raises:
        LostError: when the server does not answer, or not in time.
        RolloutEngineError: when it refuses, or the transfer fails on this side.
    """
    factory, told = _vllm()
    workers = int(connection.call("/get_world_size")["world_size"])
    own = connection.another()
    calls = _Calls(own)
    opened: list[Any] = []

    def work() -> None:
        try:
            address, port = _meeting(own.url)
            init = told(address, port, workers + 1, packed_buffer_size_bytes=_BUFFER_BYTES, rank=0)
            with _on(weights.device):
                engine = factory.trainer_init(init, client=calls, source=weights)
                opened.append(engine)
                if calls.outcome.done():  # given up meanwhile: nothing else ends the group that came too late
                    end()
                else:
                    engine.send_weights()
            calls.settle()
        except BaseException as error:
            calls.settle(error)
        finally:
            own.close()

    def end() -> None:
        with suppress(IndexError):  # whichever thread takes it from the list
            opened.pop().shutdown()

    with _SENDING:
        threading.Thread(target=work, daemon=True).start()
        try:
            calls.outcome.result(own.timeout)
        except TimeoutError as error:
            raise LostError(f"{own.url} did not take the weights within {own.timeout:g} s") from error
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
    """Have a server forget an update that broke off: vLLM would refuse the next one, or take it for the rest of it."""
    for path in ("/start_weight_update", "/finish_weight_update", "/shutdown_weight_transfer_engine"):
        with suppress(RolloutEngineError):  # an update that has begun cannot begin; it can be finished
            connection.call(path, {})


class _Calls:
    """What vLLM's trainer side asks of the server: its `VLLMWeightSyncClient`, with our time limits and key.

    Attributes:
        outcome: of the transfer; an error as soon as a call fails, because the group may then wait without limit.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.outcome: Future[None] = Future()

    def settle(self, error: BaseException | None = None) -> None:
        """The transfer has ended; the first word counts."""
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
    """Where the group meets: the IPv4 address of this machine that faces the server, and a free port."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        # Nothing is sent: a datagram socket that is connected knows the way.
        towards.connect((parts.hostname, parts.port or 80))
        address = str(towards.getsockname()[0])
    with socket.socket() as free:
        free.bind((address, 0))
        return address, int(free.getsockname()[1])


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """The present device is one of the thread, and vLLM sends from it."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
