"""The calls of a vLLM server (`vllm serve`): token ids in and out, and its interface for training.

The server is started with VLLM_SERVER_DEV_MODE=1 (which opens the calls that replace weights), `--enable-scale-out`
(which opens the one that takes and gives token ids) and `--logprobs-mode processed_logprobs` (log-probs at the row's
temperature; vLLM's default are those of temperature 1); for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1,
`--enable-lora` and a `--max-lora-rank` as well; for weights over NCCL with
`--weight-transfer-config '{"backend": "nccl"}'`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from opd.errors import RolloutEngineError
from student.rollout.servers.dialect import PARTIAL, Answer, Ask, Dialect, Facts, barred, most_bytes
from student.rollout.servers.http import Connection, RefusedError
from student.rollout.servers.transfer import reset, send

if TYPE_CHECKING:
    from student.rollout.servers.held import HeldWeights

_GENERATE = "/inference/v1/generate"
_MOST_BARRED = 1024
"""Ids with a bias that a row may have on a GPU; a row with more ends the server."""
_PAUSED_SECONDS = 0.25
"""Seconds after which a row that met a pause is sent again."""
_ANSWER_SECONDS = 60.0  # timeout for calls that a server answers without computing


class VllmDialect(Dialect):
    """See `student.rollout.servers.dialect.Dialect`."""

    engine: ClassVar[str] = "vLLM"
    receives: ClassVar[bool] = True

    def facts(self, connection: Connection, *, adapters: bool, nccl: bool) -> Facts:
        try:
            found = connection.call("/server_info?config_format=json")["vllm_config"]
        except RefusedError as error:
            if error.code != 404:
                raise
            return Facts(0, 0, "does not allow its weights to be replaced; start it with VLLM_SERVER_DEV_MODE=1")
        model = found["model_config"]
        most = int(model["max_logprobs"])
        wrong = ""
        # Only the first problem is reported; others show once the server has been restarted.
        if model["logprobs_mode"] != "processed_logprobs":
            wrong = (
                f"returns {model['logprobs_mode']} instead of the log-probs of the distribution it samples from; "
                "start it with --logprobs-mode processed_logprobs"
            )
        elif adapters and not found.get("lora_config"):
            wrong = (
                "does not accept adapters; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set "
                "rollout.engine.merge_adapters: true"
            )
        elif nccl and (found.get("weight_transfer_config") or {}).get("backend") != "nccl":
            wrong = (
                'does not accept weights over NCCL; start it with --weight-transfer-config \'{"backend": '
                '"nccl"}\', or set rollout.engine.transfer: folder'
            )
        elif not self._takes_ids(connection):
            wrong = "does not accept token ids; start it with --enable-scale-out"
        version = ""
        with suppress(RefusedError):
            version = str((connection.call("/version") or {}).get("version", ""))
        return Facts(int(model["max_model_len"]), 2**31 if most < 0 else most, wrong, version, _MOST_BARRED)

    @staticmethod
    def _takes_ids(connection: Connection) -> bool:
        try:
            # An empty request is refused as invalid if the call exists. A real row would hang if the server is paused.
            connection.call(_GENERATE, {})
        except RefusedError as error:
            if error.code >= 500:
                raise
            return error.code not in (403, 404)
        return True

    def holds(self, connection: Connection, *, adapters: bool) -> frozenset[str]:
        if not adapters:
            # A rank that is alive would hold the lock, so a paused server was left by a rank that was killed while
            # loading, whatever its label says. Loading again resumes it.
            if connection.call("/is_paused")["is_paused"]:
                return frozenset()
            return frozenset({str(connection.call("/weight_info")["weight_version"])})
        return frozenset(str(model["id"]) for model in connection.call("/v1/models")["data"] if model.get("parent"))

    def load(self, connection: Connection, folder: Path, label: str) -> None:
        with _replaced(connection, label):
            change = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            connection.call("/collective_rpc", change)

    def receive(self, connection: Connection, weights: "HeldWeights", label: str) -> None:
        broke_off = connection.call("/weight_info")["weight_version"] == PARTIAL
        with _replaced(connection, label):
            if broke_off:
                reset(connection)
            try:
                send(weights, connection)
            except RolloutEngineError:
                # Layers that received nothing have no memory until the reset, and a row would crash the server.
                reset(connection)
                raise

    def load_adapter(self, connection: Connection, folder: Path, label: str, old: frozenset[str]) -> None:
        connection.call("/v1/load_lora_adapter", {"lora_name": label, "lora_path": str(folder)})
        for name in sorted(old - {label}):
            connection.call("/v1/unload_lora_adapter", {"lora_name": name})

    def generate(self, connection: Connection, ask: Ask, *, adapters: bool) -> Answer:
        sampling = {
            "temperature": ask.temperature,
            "max_tokens": ask.limit,
            "stop_token_ids": ask.stops,
            # Only `stops` end a row; the model's generation config may name end tokens that are not among them.
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": ask.top,
            "seed": ask.seed,
            **barred(ask.barred),
        }
        body = {"token_ids": ask.prompt, "sampling_params": sampling}
        body |= {"model": ask.weights} if adapters else {}
        found = _once_resumed(connection, lambda: connection.call(_GENERATE, body, most_bytes=most_bytes(ask)))
        (choice,) = found["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            return Answer([], [], [], [], (), whole=False)
        ids, content = choice["token_ids"], choice["logprobs"]["content"]
        if [entry["token_id"] for entry in content] != ids:
            raise RolloutEngineError(f"{connection.url} returned log-probs of other tokens than it sampled.")
        # The sampled token comes first, then others by rank; the sampled one is among these only if in the top k.
        likely = [sorted(entry["top_logprobs"], key=lambda one: one["rank"])[: ask.top] for entry in content if ask.top]
        top, top_logp = ([[best[name] for best in row] for row in likely] for name in ("token_id", "logprob"))
        spans = [str(span["version"]) for span in choice["weight_versions"] or ()]
        weights = (str(found["model"]),) if adapters else tuple(dict.fromkeys(spans))
        return Answer(ids, [entry["logprob"] for entry in content], top, top_logp, weights)


def _once_resumed(connection: Connection, call: Callable[[], Any]) -> Any:
    """What `call` returns; while the server is paused for other weights, and refuses rows, it is called again.

    vLLM up to 0.32 lets rows wait for the end of a pause by itself.

    Raises:
        RefusedError: if the pause takes longer than a call on this connection may.
    """
    until = time.monotonic() + connection.seconds
    while True:
        try:
            return call()
        except RefusedError as error:
            if error.code != 503 or "paused" not in str(error) or time.monotonic() >= until:
                raise
        time.sleep(_PAUSED_SECONDS)


@contextmanager
def _replaced(connection: Connection, label: str) -> Iterator[None]:
    """Around replacing the weights: rows in flight finish with the old weights, and new rows wait."""
    connection.call("/pause?mode=wait", {})
    try:
        connection.call("/update_weight_version", {"new_version": PARTIAL})
        yield
        # Otherwise, keys and values of the old weights would be reused for equal prompts.
        connection.call("/reset_prefix_cache", {})
        connection.call("/update_weight_version", {"new_version": label})
    finally:
        # After an error too: a paused server answers no request, so this run could not repair it. The timeout is
        # short, because a server that hangs has already been given the time that loading weights takes.
        last = connection.another(min(_ANSWER_SECONDS, connection.seconds))
        try:
            last.call("/resume", {})
        finally:
            last.close()
