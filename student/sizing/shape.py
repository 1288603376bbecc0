"""Sizes of the parts of a model in parameters and bytes, from its config alone: no weights are loaded.

The model runs on torch's fake tensors, which have a shape but no data. What autograd saves in a forward pass is counted
tensor by tensor, with the adapters, autocast and recomputation that the run would have. A family whose forward pass
looks at data, as some routers do, cannot run on them: what would have been counted is then not known.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, DynamicCache

from opd.errors import ConfigError, one_line
from opd.kv_cache import reading
from opd.model_path import refuse_missing
from opd.pretrained import read_config
from student.data.prefixes import Prefixes
from student.model.adamw_8bit import moment_bytes
from student.model.continued import continues
from student.model.lora import add_lora
from student.model.model import Student
from student.model.quantized import four_bit_bytes
from student.model.recompute import recompute
from student.model.sharding import layer_of
from student.settings.model import ModelSettings

log = logging.getLogger(__name__)


class ModelShape:
    """The sizes of a model.

    Args:
        settings: the recipe's `model` group.
        autocast: dtype of matrix products in the forward pass, or None for that of the weights.
        sharded: whether the forward pass runs on weights of dtype `autocast` that are gathered from the ranks, instead
            of weights that autocast casts.

    Attributes:
        total: number of parameters; tied ones count once.
        active: number of parameters used for a token; of the experts, only as many as its router chooses count.
        trained: number of trained parameters.
        weight_bytes: bytes of all parameters.
        trained_bytes: bytes of the trained parameters, and so of their gradients.
        widened: bytes of the largest weight that is held in 4 bits once it is dequantized for a product.
        head_bytes: bytes of the float32 gradients of head and embeddings before they are added to those that are kept;
            tied weights have two such gradients, frozen ones have none.
        layer: parameters of the largest decoder layer.
        outside: parameters outside the decoder layers.
        width: bytes of one weight in the forward pass.
        cast_bytes: bytes of the casts of the layers' weights that autocast keeps while rows are decoded.
        layers: number of decoder layers.
        vocabulary: number of rows of the head.
        hidden: size of the hidden states that the head reads.
        cache_bytes: bytes of keys and values per token; None if not known.
        state_bytes: bytes of the states of linear attention, convolutions and the like, which a response of any length
            takes once; None if not known.

    Raises:
        ConfigError: when the model's config cannot be read or describes no causal language model.
    """

    def __init__(self, settings: ModelSettings, autocast: torch.dtype | None = None, *, sharded: bool = False) -> None:
        refuse_missing(settings.path)
        config = read_config(settings.path, revision=settings.revision)
        self._autocast = autocast
        self._checkpointing = settings.gradient_checkpointing
        extra = {"attn_implementation": settings.attention} if settings.attention in ("sdpa", "eager") else {}
        with torch.device("meta"):
            try:
                lm = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype), **extra)
            except Exception as error:  # a config whose values do not fit together may raise anything
                raise ConfigError(f"model {settings.path!r} cannot be built: {one_line(error, 300)}.") from error
            quantized = _quantized(lm) if settings.lora is not None and settings.lora.quantize else []
            if settings.lora is not None:
                add_lora(lm, settings.lora, base=settings.path)
        parameters = list(lm.parameters())
        trained = [p for p in parameters if p.requires_grad]
        self.total, self.trained = (sum(p.numel() for p in group) for group in (parameters, trained))
        self.active = self.total - _passed_over(lm)
        self.weight_bytes, self.trained_bytes = (_bytes(group) for group in (parameters, trained))
        self.weight_bytes += sum(four_bit_bytes(p.numel()) for p in quantized) - _bytes(quantized)
        self.widened = max((p.numel() for p in quantized), default=0) * lm.dtype.itemsize
        self._trained_shapes = [tuple(p.shape) for p in trained]
        self.width = (autocast or lm.dtype).itemsize
        parts: dict[int | None, int] = {None: 0}
        for name, parameter in lm.named_parameters():
            parts[layer_of(name)] = parts.get(layer_of(name), 0) + parameter.numel()
        self.outside = parts.pop(None)
        self.layer = max(parts.values(), default=0)
        casts = autocast is not None and lm.dtype == torch.float32 and not sharded and not quantized
        self.cast_bytes = (self.total - self.outside) * self.width if casts else 0
        # These forward passes allocate nothing, so the cache and activations of any model can be counted anywhere.
        with FakeTensorMode(allow_non_fake_inputs=True) as self._fake, _experts_counted():
            _without_content(lm, autocast if sharded else None)
            self._student = Student(lm, dropout=settings.dropout)
            head = lm.get_output_embeddings().weight
            self.vocabulary, self.hidden = head.shape
            both = (head, lm.get_input_embeddings().weight)
            self.head_bytes = sum(weight.numel() * 4 for weight in both if weight.requires_grad)
            self.layers = int(config.get_text_config().num_hidden_layers)
            cached = self._cached(lm)
            self.cache_bytes = None if cached is None else cached[0]
            self.state_bytes = None if cached is None else cached[1]

    def small_moments(self, ranks: int) -> int:
        """Bytes of AdamW's moments in 8 bits, sharded over `ranks` ranks, on all of them together."""
        return moment_bytes(self._trained_shapes, ranks)

    def _cached(self, lm: Any) -> tuple[int, int] | None:
        """`cache_bytes` and `state_bytes`, from caches of one and of two tokens."""
        width = (self._autocast or lm.dtype).itemsize
        sizes = []
        try:
            for length in (1, 2):
                cache = DynamicCache(config=lm.config)
                with torch.no_grad():
                    lm.base_model(torch.zeros(1, length, dtype=torch.long), **reading(lm.base_model, cache))
                sizes.append(sum(t.numel() for layer in cache.layers for t in _held(vars(layer))) * width)
        except Exception as error:  # a family may fail on fake tensors in any way
            log.info("the cache cannot be counted: %s: %s", type(error).__name__, error)
            return None
        per_token = sizes[1] - sizes[0]
        # A model that leaves the cache empty keeps what it remembers elsewhere.
        return (per_token, sizes[0] - per_token) if sizes[0] else None

    def continues(self, longest: int) -> bool:
        """Whether the model reads rows of up to `longest` tokens after prefixes as it reads them whole."""
        return continues(self._student.lm, longest)

    def activation_bytes(self, rows: int, width: int, prefixes: int = 0, prefix: int = 0) -> int | None:
        """Bytes that autograd saves in a forward pass over [rows, width] tokens; None if not known.

        They follow so many prefixes of `prefix` tokens, if there are any.

        With gradient checkpointing, this is what remains saved plus the activations of one recomputed layer.

        Raises:
            ConfigError: if there is no gradient checkpointing for this family.
        """
        undo = recompute(self._student.lm) if self._checkpointing else lambda: None
        try:
            kept = self._saved(rows, width, prefixes, prefix)
        except Exception as error:  # as for the cache
            log.info("activations cannot be counted: %s: %s", type(error).__name__, error)
            return None
        finally:
            undo()
        return kept + self._saved(rows, width, prefixes, prefix) // self.layers if self._checkpointing else kept

    def _saved(self, rows: int, width: int, prefixes: int, prefix: int) -> int:
        # Counted by storage, because several views of one tensor may be saved but take memory once. Parameters are left
        # out, since they are counted elsewhere.
        own = {p.untyped_storage()._cdata for p in self._student.parameters()}
        storages: dict[int, int] = {}
        kept = []  # keeps the tensors alive, so that no address is used by two storages

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                storages[storage._cdata] = storage.nbytes()
                kept.append(tensor)
            return tensor

        casting = nullcontext() if self._autocast is None else torch.autocast("cpu", self._autocast)
        with (
            self._fake,
            _experts_counted(),
            casting,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            ids = torch.zeros(rows, width, dtype=torch.long)
            at = torch.zeros(rows * width, dtype=torch.long)
            before = None
            if prefixes:
                first = torch.zeros(prefixes, prefix, dtype=torch.long)
                before = Prefixes(first, first.sum(1) + prefix, torch.zeros(rows, dtype=torch.long))
            self._student(ids, torch.ones_like(ids), at, at, before)
        return sum(storages.values())


def _held(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that a layer of a cache holds, by themselves or in containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _held(part)


def _passed_over(lm: Any) -> int:
    """Number of expert parameters that are not used for a token."""
    chosen = getattr(lm.config.get_text_config(), "num_experts_per_tok", None)
    stacked = [p for name, p in lm.named_parameters() if ".experts." in name and p.ndim == 3]
    return sum(int(p.numel() * (1 - min(1.0, chosen / len(p)))) for p in stacked) if chosen else 0


@contextmanager
def _experts_counted() -> Iterator[None]:
    """Make experts use transformers' own grouped product: torch's supports fake tensors in bfloat16 only."""
    from transformers.integrations import moe

    able: Any = getattr(moe, "_can_use_grouped_mm", None)
    if able is None:  # an older transformers, whose experts are modules
        yield
        return
    moe._can_use_grouped_mm = lambda *tensors: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = able


def _quantized(lm: Any) -> list[torch.nn.Parameter]:
    """The weights that `model.lora.quantize` holds in 4 bits: those of all linear layers except the head."""
    head = lm.get_output_embeddings()
    linear = [m for m in lm.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return [m.weight for m in linear if isinstance(m.weight, torch.nn.Parameter)]


def _without_content(model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace a model's meta tensors by fake CPU tensors, for which autograd saves what it would on a CPU.

    Tied tensors stay tied.

    Args:
        model: the model, changed in place.
        dtype: new dtype of its parameters, or None to keep theirs.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        is_parameter = isinstance(tensor, torch.nn.Parameter)
                        kind = dtype if dtype is not None and is_parameter else tensor.dtype
                        fake = torch.empty(tensor.shape, dtype=kind, device="cpu")
                        made[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    held[name] = made[id(tensor)]  # type: ignore[assignment]


def _bytes(tensors: list[torch.nn.Parameter]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
