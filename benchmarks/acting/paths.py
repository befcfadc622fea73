"""Ways to run an act function: eager, torch.compile's backends and modes, CUDA graphs, AOTInductor, onnxruntime, NumPy.

Each is built for one input shape. One that can't be built here raises an error that says why.
"""

import importlib.util
import io
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

Tensors = tuple[Tensor, ...]
FIRST_CALLS = 4  # calls that may still compile, or record a graph


@dataclass
class Built:
    """A way to run an act function, for one shape of the inputs."""

    call: Callable[..., Tensors]  # (obs, noise) -> outputs
    refresh: Callable[[], None] | None = None  # copies the module's weights again, if `call` works on a copy of them
    compiles: bool = False  # whether Dynamo must have compiled a frame in the first call


def path_names(device: torch.device) -> list[str]:
    """All ways for a device, eager first, including every backend and mode that this PyTorch lists."""
    modes = [mode for mode in torch._inductor.list_mode_options() if mode != "default"]
    backends = ["aot_eager", *torch._dynamo.list_backends()]
    compiled = [*backends, *(f"inductor/{mode}" for mode in modes), "inductor/cpp_wrapper"]
    if device.type == "cuda":
        return ["eager", *compiled, "CudaGraphModule", "inductor+CudaGraphModule", "aoti"]
    return ["eager", *compiled, "aoti", "ort", "numpy"]


def build_and_call(
    path: str, act: nn.Module, inputs: Tensors, run: Callable[[Built], None]
) -> tuple[Built, float, int]:
    """Build a way and `run` it a few times -> the way, seconds that this took, compiled graphs."""
    counters.clear()
    start = time.perf_counter()
    built = build(path, act, inputs)
    for _ in range(FIRST_CALLS):
        run(built)
    seconds, graphs = time.perf_counter() - start, counters["stats"]["unique_graphs"]
    if built.compiles and not graphs:
        raise RuntimeError("nothing was compiled")
    return built, seconds, graphs


def separate(act: nn.Module) -> Callable[..., Tensors]:
    """A function that runs the module, with a code object of its own.

    Dynamo stores compiled code by code object and searches all of it at each call: without this, ten shapes would slow
    each other down and hit the recompilation limit.
    """

    def run(obs: Tensor, noise: Tensor) -> Tensors:
        return act(obs, noise)

    return types.FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)


def build_compiled(path: str, act: nn.Module) -> Built:
    """torch.compile by the name of a backend, or of Inductor with one of its modes."""
    backend, _, mode = path.partition("/")
    options = {"options": {"cpp_wrapper": True}} if mode == "cpp_wrapper" else {"mode": mode or None}
    call = torch.compile(separate(act), backend=backend, fullgraph=True, dynamic=False, **options)
    return Built(call, compiles=True)


def build_graph(path: str, act: nn.Module) -> Built:
    """A CUDA graph of the eager or of the compiled function, by tensordict's CudaGraphModule."""
    from tensordict.nn import CudaGraphModule

    compiled = path.startswith("inductor")
    function = build_compiled("inductor", act).call if compiled else separate(act)
    return Built(CudaGraphModule(function, warmup=3), compiles=compiled)


def build_aoti(act: nn.Module, inputs: Tensors) -> Built:
    """AOTInductor, bound to the memory of the module's weights.

    By default it copies them and folds small ones permanently into the code; those of one element, such as the bias of
    a value head, even if constant tensors are to be kept.
    """
    fixed = {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False}
    exported = torch.export.export(act, inputs)
    with tempfile.TemporaryDirectory() as folder:
        package = str(Path(folder, "act.pt2"))
        torch._inductor.aoti_compile_and_package(exported, package_path=package, inductor_configs=fixed)
        compiled = torch._inductor.aoti_load_package(package)
    names = set(compiled.get_constant_fqns())

    def refresh() -> None:
        weights = {name: x.detach() for name, x in act.state_dict(keep_vars=True).items() if name in names}
        compiled.load_constants(weights, check_full_update=True, user_managed=True)

    refresh()
    return Built(compiled, refresh)


def build_ort(act: nn.Module, inputs: Tensors) -> Built:
    """onnxruntime on the CPU, with as many threads as PyTorch.

    A session folds the weights into its graph and ignores new values passed later: a refresh creates a new session.
    """
    import onnx
    import onnxruntime

    state, file, held = {name: x.clone() for name, x in act.state_dict().items()}, io.BytesIO(), {}
    for weights in act.parameters():
        nn.init.normal_(weights)  # the exporter would merge equal tensors, such as zero biases, into one
    torch.onnx.export(act, inputs, file, dynamo=False, input_names=["obs", "noise"], do_constant_folding=False)
    act.load_state_dict(state)
    model = onnx.load_from_string(file.getvalue())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1

    def refresh() -> None:
        weights = {name: x.detach().numpy() for name, x in act.named_parameters()}
        for initializer in model.graph.initializer:
            if initializer.name in weights:
                initializer.raw_data = weights[initializer.name].tobytes()
        content = model.SerializeToString()
        held["session"] = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        held["inputs"] = [x.name for x in held["session"].get_inputs()]

    def call(obs: Tensor, noise: Tensor) -> Tensors:
        given = {"obs": obs.numpy(), "noise": noise.numpy()}
        outputs = held["session"].run(None, {name: given[name] for name in held["inputs"]})
        return tuple(map(torch.from_numpy, outputs))

    refresh()
    return Built(call, refresh)


def build_numpy(act: nn.Module) -> Built:
    """The functions that the scripts act by on the CPU."""
    function = act.in_numpy()

    def call(obs: Tensor, noise: Tensor) -> Tensors:
        return tuple(map(torch.from_numpy, map(np.asarray, function(obs.numpy(), noise.numpy()))))

    return Built(call)


def build(path: str, act: nn.Module, inputs: Tensors) -> Built:
    """A way to run an act function for inputs of this shape. Its set-up cost falls here and in the first calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path == "eager":
            return Built(separate(act))
        if path.endswith("CudaGraphModule"):
            return build_graph(path, act)
        if path == "aoti":
            return build_aoti(act, inputs)
        if path == "ort":
            missing = [name for name in ("onnxruntime", "onnx") if importlib.util.find_spec(name) is None]
            if missing:
                raise ModuleNotFoundError(f"not installed: {' and '.join(missing)}")
            return build_ort(act, inputs)
        return build_numpy(act) if path == "numpy" else build_compiled(path, act)
