"""How a vLLM server is asked, by `vllm serve` of 0.32: tokens in and out, and its interface for training.

The server is started with VLLM_SERVER_DEV_MODE=1 (which opens the calls that replace weights), `--enable-scale-out`
(which opens the one that takes and gives token ids) and `--logprobs-mode processed_logprobs` (log-probs at the row's
temperature; vLLM's default are those of temperature 1); for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1,
`--enable-lora` and a `--max-lora-rank` as well; for weights over NCCL with
`--weight-transfer-config '{"backend": "nccl"}'`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from opd.errors import RolloutEngineError
from student.rollout.servers.dialect import PARTIAL, Answer, Ask, Facts, barred
from student.rollout.servers.http import Connection, RefusedError
from student.rollout.servers.transfer import reset, send

if TYPE_CHECKING:
    from student.rollout.servers.held import HeldWeights

_ANSWER_SECONDS = 60.0  # for what a server does without computing


class VllmDialect:
    """See `student.rollout.servers.dialect.Dialect`."""

    receives: ClassVar[bool] = True

    def facts(self, connection: Connection, *, adapters: bool, nccl: bool) -> Facts:
        """See `Dialect.facts`."""
        try:
            found = connection.call("/server_info?config_format=json")["vllm_config"]
        except RefusedError as error:
            if error.code != 404:
                raise
            return Facts(0, 0, "does not let its weights be replaced; start it with VLLM_SERVER_DEV_MODE=1")
        model = found["model_config"]
        most = int(model["max_logprobs"])
        wrong = ""
        # The first thing to put right; the others show when the server is started again.
        if model["logprobs_mode"] != "processed_logprobs":
            wrong = (
                f"gives {model['logprobs_mode']}, not those of the distribution that is sampled; start it with "
                "--logprobs-mode processed_logprobs"
            )
        elif adapters and not found.get("lora_config"):
            wrong = (
                "takes no adapters; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set "
                "rollout.engine.merge_adapters: true"
            )
        elif nccl and (found.get("weight_transfer_config") or {}).get("backend") != "nccl":
            wrong = (
                "takes no weights over NCCL; start it (vLLM 0.32) with --weight-transfer-config "
                '\'{"backend": "nccl"}\', or set rollout.engine.transfer: folder'
            )
        elif not self._takes_ids(connection):
            wrong = "takes no token ids; start it with --enable-scale-out"
        return Facts(int(model["max_model_len"]), 2**31 if most < 0 else most, wrong)

    @staticmethod
    def _takes_ids(connection: Connection) -> bool:
        try:
            # Without ids: refused for that where the call is there. A row would wait where the server is paused.
            connection.call("/inference/v1/generate", {})
        except RefusedError as error:
            if error.code >= 500:
                raise
            return error.code not in (403, 404)
        return True

    def holds(self, connection: Connection, *, adapters: bool) -> frozenset[str]:
        """See `Dialect.holds`."""
        if not adapters:
            # Paused, it is as a rank left it that was killed while it loaded, whatever its label says: a rank that
            # lives holds the lock. Loading again is what has it go on.
            if connection.call("/is_paused")["is_paused"]:
                return frozenset()
            return frozenset({str(connection.call("/weight_info")["weight_version"])})
        return frozenset(str(model["id"]) for model in connection.call("/v1/models")["data"] if model.get("parent"))

    def load(self, connection: Connection, folder: Path, label: str) -> None:
        """See `Dialect.load`."""
        with _replaced(connection, label):
            change = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            connection.call("/collective_rpc", change)

    def receive(self, connection: Connection, weights: "HeldWeights", label: str) -> None:
        """See `Dialect.receive`."""
        broke_off = connection.call("/weight_info")["weight_version"] == PARTIAL
        with _replaced(connection, label):
            if broke_off:
                reset(connection)
            try:
                send(weights, connection)
            except RolloutEngineError:
                # Layers that got nothing have no memory until then, and a row would end the server.
                reset(connection)
                raise

    def load_adapter(self, connection: Connection, folder: Path, label: str, old: frozenset[str]) -> None:
        """See `Dialect.load_adapter`."""
        connection.call("/v1/load_lora_adapter", {"lora_name": label, "lora_path": str(folder)})
        for name in sorted(old - {label}):
            connection.call("/v1/unload_lora_adapter", {"lora_name": name})

    def generate(self, connection: Connection, ask: Ask, *, adapters: bool) -> Answer:
        """See `Dialect.generate`."""
        sampling = {
            "temperature": ask.temperature,
            "max_tokens": ask.limit,
            "stop_token_ids": ask.stops,
            # What ends a row is `stops`, which may leave out tokens that the model's generation config ends with.
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": ask.top,
            "seed": ask.seed,
            **barred(ask.barred),
        }
        body = {"token_ids": ask.prompt, "sampling_params": sampling}
        found = connection.call("/inference/v1/generate", body | ({"model": ask.weights} if adapters else {}))
        choice = found["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            return Answer([], [], [], (), whole=False)
        ids, content = [int(i) for i in choice["token_ids"]], choice["logprobs"]["content"]
        if [entry["token_id"] for entry in content] != ids:
            raise RolloutEngineError(f"{connection.url} gave log-probs of other tokens than it sampled.")
        # The sampled one comes first, the others by rank, among them the sampled one only where it is one of the k.
        top = [
            [best["token_id"] for best in sorted(entry["top_logprobs"], key=lambda one: one["rank"])[: ask.top]]
            for entry in content
        ]
        spans = [str(span["version"]) for span in choice["weight_versions"] or ()]
        weights = (str(found["model"]),) if adapters else tuple(dict.fromkeys(spans))
        return Answer(ids, [float(entry["logprob"]) for entry in content], top if ask.top else [], weights)


@contextmanager
def _replaced(connection: Connection, label: str) -> Iterator[None]:
    """Around the replacing of weights: rows under way end with those that they began with, others wait."""
    connection.call("/pause?mode=wait", {})
    try:
        connection.call("/update_weight_version", {"new_version": PARTIAL})
        yield
        # Keys and values of the old weights would be reused under equal prompts.
        connection.call("/reset_prefix_cache", {})
        connection.call("/update_weight_version", {"new_version": label})
    finally:
        # Also after an error: a server that stays paused would answer no request, this run's repair included. A server
        # that hangs has had the time that weights take already.
        last = connection.another(min(_ANSWER_SECONDS, connection.timeout))
        try:
            last.call("/resume", {})
        finally:
            last.close()
