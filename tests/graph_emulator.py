"""What a CUDA graph does to a function, on a CPU: a stand-in for tensordict's CudaGraphModule, by the same interface.

The first calls only run. Then one call runs, and its tensor operations are recorded. Each later call copies its
arguments into the memory of the recording and repeats the recorded operations, on the same memory; no Python runs. So
all that Python decides, and each number that it reads, stays as it was at the recording, as in a graph.

What a GPU refuses while it records ends in a RefusedCapture that names the line: a number read from a tensor, a shape
that depends on data, memory of the host. Kernels of Inductor go past PyTorch's dispatcher, where nothing can record
them; code compiled by the backend "aot_eager" does not.
"""

import contextlib
import math
import traceback
from pathlib import Path
from types import ModuleType
from typing import ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

LIBRARIES = (str(Path(torch.__file__).parents[1]), contextlib.__file__, __file__, "<")
FROM_HOST = {"from_numpy": torch, "as_tensor": torch, "tensor": torch, "frombuffer": torch}
TO_HOST = {"cpu": Tensor, "numpy": Tensor, "tolist": Tensor, "__array__": Tensor, "__bool__": Tensor, "item": Tensor}


class RefusedCapture(RuntimeError):
    """A function does what a CUDA graph can't hold."""

    def __init__(self, reason: str):
        frames = [x for x in traceback.extract_stack() if not x.filename.startswith(LIBRARIES)]
        line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
        super().__init__(f"while a graph is recorded, {reason}\n{line}")


class Operation(NamedTuple):
    """A recorded operation; `results` are those in memory of their own, which no argument shares."""

    function: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    outputs: list[Tensor]
    results: list[int]  # which of the outputs

    @property
    def is_launch(self) -> bool:
        """Whether it takes a kernel: a view takes none, nor does memory that is only allocated."""
        allocates = self.function.name().startswith(("aten::empty", "aten::new_empty"))
        return self.function._schema.is_mutable or (bool(self.results) and not allocates)

    def repeat(self) -> None:
        outputs = tensors_in(self.function(*self.args, **self.kwargs))
        for i in self.results:
            self.outputs[i].copy_(outputs[i])


def tensors_in(tree) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def memory(x: Tensor) -> int:
    """What is equal for two tensors if they share memory."""
    return x.untyped_storage()._cdata


def why_refused(function: torch._ops.OpOverload, args: tuple) -> str | None:
    """What a GPU could not record in this operation."""
    if torch.Tag.data_dependent_output in function.tags:
        return f"{function.name()} reads a number from the device"
    if function.name().startswith("aten::index"):
        masks = [x for x in tensors_in(args[1:2]) if x.dtype in (torch.bool, torch.uint8)]
        return f"{function.name()} by a mask has a shape that depends on data" if masks else None
    if torch.Tag.dynamic_output_shape in function.tags:
        return f"{function.name()} has a shape that depends on data"
    return None


class Recorder(TorchDispatchMode):
    """Records the operations of what runs within, and undoes all their changes at its end."""

    def __init__(self):
        super().__init__()
        self.operations, self.own, self.before = [], set(), {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as such, and its operations are recorded

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if reason := why_refused(function, args):
            raise RefusedCapture(reason)
        if function._schema.is_mutable:
            self.remember(function, args, kwargs)
        shared = {memory(x) for x in tensors_in((args, kwargs))}
        result = function(*args, **kwargs)
        outputs = tensors_in(result)
        results = [i for i, x in enumerate(outputs) if memory(x) not in shared]
        self.own.update(memory(outputs[i]) for i in results)
        self.operations.append(Operation(function, args, kwargs, outputs, results))
        return result

    def remember(self, function: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
        """Keep what lies in memory that is older than the recording and is to be changed."""
        for i, declared in enumerate(function._schema.arguments):
            if declared.alias_info is None or not declared.alias_info.is_write:
                continue
            for x in tensors_in(args[i] if i < len(args) else kwargs.get(declared.name)):
                if memory(x) not in self.own | self.before.keys():
                    self.before[memory(x)] = (x.untyped_storage(), x.untyped_storage().clone())

    def __enter__(self):
        self.random_state = torch.get_rng_state()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for storage, content in self.before.values():
            storage.copy_(content)
        torch.set_rng_state(self.random_state)


def refusing(name: str):
    def refuse(*_args, **_kwargs):
        raise RefusedCapture(f"{name} passes between the device and the host")

    return refuse


@contextlib.contextmanager
def host_out_of_reach():
    """Ways to and from the host that are no tensor operations on a CPU, where there is nothing to copy."""
    with contextlib.ExitStack() as stack:
        for name, owner in (FROM_HOST | TO_HOST).items():
            stack.enter_context(mock.patch.object(owner, name, refusing(f"{owner.__name__}.{name}")))
        yield


class EmulatedGraph:
    """CudaGraphModule(module, warmup): the first calls run, that of number `warmup` is recorded too, others replay."""

    def __init__(self, module, warmup: int = 2):
        if not isinstance(warmup, int) or warmup < 1:
            raise ValueError("warmup must be an integer greater than 0.")
        self.module, self.warmup, self.counter, self.operations = module, warmup, 0, None

    def __call__(self, *args, **kwargs):
        self.counter += 1
        if self.operations is not None:
            return self.replay(tree_leaves((args, kwargs)))
        arguments = tree_map_only(Tensor, self.clone, (args, kwargs))
        result = self.module(*arguments[0], **arguments[1])
        if self.counter == self.warmup:
            self.capture((args, kwargs))
        return result

    @staticmethod
    def clone(x: Tensor) -> Tensor:
        if x.requires_grad:
            raise RuntimeError("an argument of a graph must not require gradients: the function must close over it")
        return x.clone()

    def capture(self, arguments: tuple) -> None:
        """Record what the function does to buffers of its arguments' shapes. As on a GPU, nothing changes by that."""
        leaves, structure = tree_flatten(arguments)
        self.buffers = [self.clone(x) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(self.buffers, structure)
        with Recorder() as recorder, host_out_of_reach():
            self.result = self.module(*args, **kwargs)
        self.operations = recorder.operations

    def replay(self, leaves: list):
        for buffer, x in zip(self.buffers, leaves, strict=True):
            if not isinstance(x, Tensor):
                if x != buffer:
                    raise ValueError(f"Varying inputs must be tensors: {buffer} was recorded, and is now {x}")
            elif x.shape != buffer.shape:
                raise ValueError(f"recorded with an input of shape {tuple(buffer.shape)}, called with {tuple(x.shape)}")
            else:
                buffer.copy_(x)
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for operation in self.operations:
                operation.repeat()
        return tree_map_only(Tensor, lambda x: x.detach().clone(), self.result)

    @property
    def launches(self) -> int:
        """How many kernels a replay would launch one by one, were it no graph."""
        return sum(operation.is_launch for operation in self.operations or ())


class EmulatedEvent:
    """torch.cuda.Event of a device that is slow: what it copies to the host without blocking is not there, but NaN is,
    until the host has waited for an event that was recorded after the copy."""

    under_way: ClassVar[list] = []  # (on the host, what will be there) of copies that no event is behind

    def __init__(self):
        self.copies = []

    def record(self) -> None:
        self.copies += self.under_way
        self.under_way.clear()

    def synchronize(self) -> None:
        for copy, x in self.copies:
            copy.copy_(x)
        self.copies.clear()


def copied(x: Tensor, *args, to=Tensor.to, **kwargs) -> Tensor:
    """Tensor.to; a copy to the host that does not block comes late."""
    to_host = args == ("cpu",) and not isinstance(args[0], GraphDevice)
    if not to_host or not kwargs.get("non_blocking"):
        return to(x, *args, **kwargs)
    late = torch.full_like(x, math.nan)
    EmulatedEvent.under_way.append((late, x.clone()))
    return late


class GraphDevice(str):
    """A device that PyTorch takes for the CPU, and a script for a GPU: all its branches for CUDA are taken."""

    type, index = "cuda", 0


def use_graphs(
    monkeypatch, script: ModuleType, backend: str | None = None, kind: type[EmulatedGraph] = EmulatedGraph
) -> list[EmulatedGraph]:
    """Let a compiled script record graphs of its functions on the CPU; what it compiles goes through `backend`.

    Returns the list in which its graphs will be, in the order in which it makes them.
    """
    graphs, validate, compile = [], script.validate, torch.compile

    def record(function, warmup):
        graphs.append(kind(function, warmup))
        return graphs[-1]

    def compile_by_backend(function, *, options, **settings):
        options = {name: x for name, x in options.items() if name == "guard_filter_fn"}  # all others are Inductor's
        return compile(function, backend=backend, options=options, **settings)

    monkeypatch.setattr(script, "CudaGraphModule", record)
    monkeypatch.setattr(script, "validate", lambda args: GraphDevice(validate(args)))
    monkeypatch.setattr(torch.cuda, "Event", EmulatedEvent)
    monkeypatch.setattr(EmulatedEvent, "under_way", [])
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    monkeypatch.setattr(Tensor, "to", copied)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device=None: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU that plays a GPU")
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _state: None)
    monkeypatch.setattr(torch, "compile", compile_by_backend)
    return graphs
