"""A pretend accelerator: tensors that report a device of their own, while their numbers stay in CPU memory.

    pytest -p pretend_device TESTS

torch and accelerate then take "pretend" for this machine's accelerator, and whatever a GPU would refuse is an error: a
tensor left on the CPU in an operation with one on the device, and `numpy()` without `cpu()`. Nothing is faster or
slower for it, and nothing of CUDA's own is seen: streams, pinned memory, kernels. Activations are not recomputed.

torch's experimental registration of backends in Python is new in 2.11; without it, importing this raises ImportError.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.utils.checkpoint
from accelerate.state import PartialState
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default, aten.set_.source_Tensor}
"""Operations between devices."""
INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default}
INDEXING |= {aten._index_put_impl_.default}
"""Operations whose second argument holds indices, which torch takes from the CPU too."""
FACTORIES = ["empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"]
FACTORIES += ["eye", "eye.m", "linspace", "tril_indices", "triu_indices"]
"""Operations that make tensors from no tensor; all others of that kind call `empty` and fill it."""

LOWERED = ["linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"]
"""Operations that autocast runs in half precision."""


class _Backend:
    """What torch asks of the module of a device."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def empty_cache(self) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: object = None) -> None: ...


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)


class OnDevice(Tensor):
    """A tensor on the pretend device.

    Attributes:
        host: the numbers, in a tensor on the CPU.
    """

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> "OnDevice":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.size(), host.stride(), host.storage_offset(), dtype=host.dtype, device=DEVICE
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied: Tensor = OnDevice(self.host.clone())
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if parameter else copied
        return cast(Tensor, memo[id(self)])

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.host!r})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter  # type: ignore[override]
    def data(self, value: "OnDevice") -> None:
        self.host = value.host

    def tolist(self) -> Any:
        return self.host.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has a tensor on the device or is asked for one there."""
    _check(func, args, kwargs)
    asked = kwargs.get("device")
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, OnDevice)]
    if func in (aten.copy_.default, aten._foreach_copy_.default):
        here = any(isinstance(one, OnDevice) for one in tree_leaves(args[0]))
    else:
        here = bool(given) if asked is None else torch.device(asked).type == NAME
    on_host = dict(tree_map_only(OnDevice, lambda one: one.host, kwargs))
    if asked is not None and here:
        on_host["device"] = torch.device("cpu")
    there = list(tree_map_only(OnDevice, lambda one: one.host, args))
    if func is aten.histc.default:  # of integers, which the CPU's lacks and CUDA's has
        there[0] = there[0].float()
    found = func(*there, **on_host)
    for one in given:
        if one.shape != one.host.shape:
            raise NotImplementedError(f"{func} resizes a tensor, which the pretend device cannot show")
    if func is aten._to_copy.default and asked is not None and isinstance(args[0], OnDevice) != here:
        found = found.clone()  # another device has other memory
    if not here:
        return found
    found = tree_map_only(Tensor, lambda one: one if isinstance(one, OnDevice) else OnDevice(one), found)
    return return_and_correct_aliasing(func, args, kwargs, found) if given else found


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse tensors of the CPU beside one on the device, as CUDA does.

    Raises:
        RuntimeError: with the operation, the devices and the shapes.
    """
    compared = (args[0], *args[2:]) if func in INDEXING else args
    tensors = [one for one in tree_leaves((compared, kwargs)) if isinstance(one, Tensor)]
    on = [isinstance(one, OnDevice) for one in tensors]
    # A number may come from anywhere.
    off = [one for one, here in zip(tensors, on, strict=True) if not here and one.dim()]
    if any(on) and off and func not in MOVES:
        told = [(str(one.device), tuple(one.shape)) for one in tensors]
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {told}")


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    source, held = (one.host if isinstance(one, OnDevice) else one for one in (source, target))
    held.copy_(source)
    return target


def _factory(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(aten, packet), overload or "default")
    return lambda *args, **kwargs: _call(func, args, kwargs)


_library = torch.library.Library("aten", "IMPL")
for _name in FACTORIES:
    _library.impl(_name, _factory(_name), "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")


def _lowered(func: Any) -> Callable[..., Any]:
    """An operation that autocast runs in its dtype, as CUDA's does."""

    def lower(tensor: Tensor) -> Tensor:
        return tensor.to(torch.get_autocast_dtype(NAME)) if tensor.is_floating_point() else tensor

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            args, kwargs = tree_map_only(Tensor, lower, (args, kwargs))
            return func(*args, **kwargs)

    return call


_autocast = torch.library.Library("aten", "IMPL")
for _name in LOWERED:
    _autocast.impl(_name, _lowered(getattr(aten, _name).default), "AutocastPrivateUse1")
_others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
_others.fallback(torch.library.fallthrough_kernel)


class _Generator(torch.Generator):
    """Numbers are drawn on the CPU."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def _stay_here(init: Callable[..., None]) -> Callable[..., None]:
    """accelerate refuses a second state on another device; tests ask for the CPU, and are given this device."""

    def with_any(self: PartialState, cpu: bool = False, **keywords: Any) -> None:
        init(self, False, **keywords)
        self._cpu = cpu

    return with_any


def _not_again(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **keywords: Any) -> Any:
    """In place of torch's checkpointing: keep what the backward pass needs, instead of computing it once more."""
    return function(*args, **keywords)


os.environ["ACCELERATE_TORCH_DEVICE"] = NAME
PartialState.__init__ = _stay_here(PartialState.__init__)  # type: ignore[method-assign]
torch.Generator = _Generator  # type: ignore[misc]
# Inference tensors cannot be wrapped; without gradients the numbers are the same.
torch.inference_mode = lambda mode=True: torch.no_grad() if mode else nullcontext()  # type: ignore[assignment, misc, return-value]
# A moved module keeps its parameters, so that tied ones stay tied, as on devices whose memory torch manages.
torch.__future__.set_swap_module_params_on_conversion(True)
# Recomputing in a backward pass raises through the device's guard, which is Python here, and that ends the process.
torch.utils.checkpoint.checkpoint = _not_again  # type: ignore[assignment]
