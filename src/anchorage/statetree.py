"""Training states as JSON and tensors, and back: what a checkpoint holds."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from anchorage.errors import AnchorageError

_MAX_DEPTH = 100
_STORABLE = "numbers, text, None, dense tensors, arrays; lists, tuples, dicts (keys int or str) of these, 100 deep"
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_DICTS: dict[str, type[dict]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SIMPLE: dict[str, Callable[[Any], Any]] = {"int": lambda digits: int(digits, 16), "float": float, "tuple": tuple}
# What safetensors both writes and reads back; tensors of any other dtype are stored as their bytes.
_NATIVE = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8}
_NATIVE |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16}


class StateTree:
    """Turns states into JSON, in which an object means what its one key says, and a flat dict of tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.layouts: dict[str, tuple[str, list[int], list[int]]] = {}  # of unusual ones: dtype, shape, stride
        self._known: dict[tuple, tuple[str, torch.Tensor]] = {}  # holds the tensor, so that no other gets its address

    def encode(self, value: Any, path: tuple) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value.bit_length() <= 64 else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind in _TENSORS and value.layout == torch.strided and not value.is_meta | value.is_quantized:
            return {"tensor": self._add(value, path)}
        if kind is np.ndarray or isinstance(value, np.generic):
            with contextlib.suppress(TypeError, ValueError):  # of text, objects, records: refused below
                tensor = torch.from_numpy(np.array(value, order="C"))
                return {"array" if kind is np.ndarray else "scalar": self._add(tensor, path)}
        if kind in (list, tuple) and len(path) < _MAX_DEPTH:
            items = [self.encode(item, (*path, index)) for index, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind in _DICTS.values() and len(path) < _MAX_DEPTH and all(type(key) in (int, str) for key in value):
            pairs = [[self.encode(key, path), self.encode(item, (*path, key))] for key, item in value.items()]
            versions = self.encode(getattr(value, "_metadata", None), (*path, "_metadata"))  # of a model's modules
            return {kind.__name__: pairs, "_metadata": versions}
        where = ".".join(map(str, path[:9]))
        raise AnchorageError(f"{where}: a {kind.__name__} cannot be stored; a state may hold {_STORABLE}")

    def _add(self, tensor: torch.Tensor, path: tuple) -> str:
        """Set a copy aside under a name taken from the path; a tensor met before has its name already."""
        t = tensor.detach()
        place = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg())
        if place in self._known and tensor.numel():
            return self._known[place][0]
        name = ".".join(map(str, path)).encode(errors="backslashreplace").decode()
        while name in self.tensors or name == "__metadata__":
            name += "'"
        plain = t.resolve_conj().resolve_neg().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if tensor.dtype not in _NATIVE or not tensor.is_contiguous():
            # A dense tensor gets its order in memory (channels last) back: kernels may round by it.
            stride = torch.empty_like(tensor, device="meta").stride()
            self.layouts[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(stride))
        self.tensors[name] = plain if tensor.dtype in _NATIVE else plain.reshape(-1).view(torch.uint8)
        self._known[place] = name, tensor
        return name


def decode_state(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that ``node`` was encoded from."""
    if not isinstance(node, dict):
        return [decode_state(item, tensors) for item in node] if isinstance(node, list) else node
    (kind, what), *more = node.items()
    if kind in _DICTS:
        made: Any = _DICTS[kind](dict(decode_state(what, tensors)))
        if versions := decode_state(more[0][1], tensors):
            made._metadata = versions
        return made
    if kind in _SIMPLE:
        return _SIMPLE[kind](decode_state(what, tensors))
    return tensors[what] if kind == "tensor" else tensors[what].numpy()[... if kind == "array" else ()]
