"""Fixtures that several packages share: the test world, built once per run, and real server processes."""

import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import pytest
from hypothesis import HealthCheck, settings
from waiting import wait_until

# Being busy is not an error: without this a property fails when one example takes 0.2 s, or drawing the first ten 1 s.
for _profile, _examples in {"patient": 25, "thorough": 500}.items():  # `make fuzz` runs the thorough one
    settings.register_profile(
        _profile, max_examples=_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("patient")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton reads this when it is first imported, which any test may cause: without a GPU its kernels are interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.fsync = lambda _: None  # no test cuts the power, and a disk that several workers share makes each of them wait
# Under nohup, or in the background of a script, programs inherit that these signals are ignored; tests that send them
# would wait in vain. A handler that does nothing lets pytest alone ignore them: what it starts gets the default again.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The workers of a run fork their programs from one warm process, which outlives them all."""
    node.workerinput["warm_process"] = forked.warm_process()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        forked.share_warm_process(*config.workerinput["warm_process"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes has a verb of its own, which names its mark, and so has the zoo."""
    for item in items:
        if "opd_zoo" in item.path.parts:
            item.add_marker("zoo")
    for mark in ("chaos", "pages"):
        if mark not in (config.getoption("-m") or ""):
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=f"minutes long; run by `make {mark}`"))


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What was loaded to collect the tests stays: no garbage collection looks through it, then or in a test."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Whatever the tests before have set: sums depend on it, and bits are compared."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_accelerator_of_another_test() -> Iterator[None]:
    """accelerate keeps one precision per process: a bare Accelerator left behind would refuse a later job's."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the `test` world: student, teacher, padded, stranger; shared by all workers of the run."""
    from opd_lab.tiny.build import build_world

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    build_world(shared / "world", "test", seed=0)
    return shared / "world"


@pytest.fixture
def experts(world: Path, tmp_path: Path) -> Path:
    """Four experts of which a token passes two, with the tokenizer of the test world."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    base = AutoConfig.from_pretrained(world / "student")
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: getattr(base, name) for name in same}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    folder = tmp_path / "experts"
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(world / "student").save_pretrained(folder)
    return folder


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""In the manner of Qwen3's: turns end in <|im_end|>, and thinking is switched off by an option."""


def chat_tokenizer(eos: str) -> Any:
    """A byte-level tokenizer with the special tokens of a chat model, which adds a BOS to plain text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    vocabulary = {piece: i for i, piece in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token="<|endoftext|>", model_max_length=512
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a chat model of random weights: its tokenizer ends in <|im_end|>, its generation config lists two."""
    from opd_lab.tiny.model import make_model
    from opd_lab.tiny.plans import Shape

    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = chat_tokenizer("<|im_end|>")
    model = make_model(Shape(hidden=32, layers=1, heads=2, vocabulary=264), 0, pad=0, end=2)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Server:
    """A teacher server in a process of its own."""

    address: str
    metrics_port: int
    process: forked.Program
    log: Path
    http_port: int = 0


Serve = Callable[..., Server]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start `opd serve` with the given flags; every server is stopped when the session ends."""
    started: list[forked.Program] = []

    def start(*flags: str) -> Server:
        folder = tmp_path_factory.mktemp("server")
        port_file, log = folder / "ports", folder / "log"
        command = [sys.executable, "-m", "teacher_server", *flags, *_on_cpu(flags), "--port", "0"]
        command += ["--metrics-port", "0", "--threads", "1", "--port-file", str(port_file)]
        process = forked.Program(command, log=log)
        started.append(process)
        wait_until(lambda: port_file.exists() or process.poll() is not None, why=log.read_text)
        if process.poll() is not None:
            raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")
        address, metrics_port, _, *door = port_file.read_text().split()
        return Server(address, int(metrics_port), process, log, int(door[0]) if door else 0)

    yield start
    for process in started:
        process.kill()
    for process in started:
        process.wait(timeout=120)


def _on_cpu(flags: Sequence[str]) -> list[str]:
    """The flag that keeps an engine on the CPU; none for one that takes no device, as its models run elsewhere."""
    from teacher_server.engines import ENGINES

    name = flags[flags.index("--engine") + 1] if "--engine" in flags else "transformers"
    return ["--device", "cpu"] if "device" in inspect.signature(ENGINES.load(name)).parameters else []


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that the product starts for itself (`student.run.local_server`) are forked from a warm process."""
    from student.run import local_server

    monkeypatch.setattr(local_server, "subprocess", forked.servers())


@pytest.fixture(scope="session")
def teacher(world: Path, serve: Serve) -> Server:
    """A server with the test world's teacher, and its student as a second model for references."""
    return serve(
        "--model", f"teacher={world / 'teacher'}", "--model", f"student={world / 'student'}", "--deterministic"
    )


@pytest.fixture(scope="session")
def lone_teacher(world: Path, serve: Serve) -> Server:
    """A server with the test world's teacher and nothing else, as the pages start one."""
    return serve("--model", f"teacher={world / 'teacher'}", "--deterministic")


@dataclass
class Collector:
    """An OTLP collector on loopback."""

    received: list[Any]
    environment: dict[str, str]

    @property
    def spans(self) -> list[Any]:
        """All spans that arrived."""
        return [span for part in self.received for scope in part.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Receives spans of what runs in its `environment`."""
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", reason="the extra otel is not installed"
    )
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: list[Any] = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.extend(request.resource_spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield Collector(received, {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_INSECURE": "true"})
    server.stop(None)
