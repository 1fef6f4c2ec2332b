"""How long a worker takes from the moment it is requested until it can take its first request.

    start_s = node_s + image_s + boot_s + load_s + compile_s + profile_s + capture_s

    node_s       the wait for a node
    image_s      size of the image / bytes that a node pulls and unpacks per second; 0 on a node that has it
    boot_s       the start of the engine's processes
    load_s       max(weights / bandwidth of the storage, weights / GPUs / bytes per second into one GPU)
    compile_s    layers of a stage * seconds to trace a layer and compile it, or read its compiled kernels
    profile_s    the engine's profiling step
    capture_s    layers of a stage * seconds to capture a layer's CUDA graphs

Tracing, compiling and capturing are bound by the host's CPU and grow with layers, not with their width
(Kabakibo et al. 2026, arXiv:2606.07362). A node that has run the same LLM has the image, the weights in its
page cache and the compiled kernels.
"""

from dataclasses import dataclass

from planner.models.llm import Llm


@dataclass(frozen=True, slots=True)
class Storage:
    """Where weights come from, with the bytes per second of one node."""

    name: str
    bandwidth_bytes_per_s: float
    is_measured: bool
    source: str

    def __post_init__(self) -> None:
        assert self.bandwidth_bytes_per_s > 0, self.name  # The catalog's reader refuses any other.


@dataclass(frozen=True, slots=True)
class Image:
    """The container image, and how many of its bytes a node pulls and unpacks per second."""

    name: str
    size_bytes: float
    bandwidth_bytes_per_s: float
    is_measured: bool
    source: str

    @property
    def pull_s(self) -> float:
        """Seconds to pull the image onto a node that does not have it."""
        return self.size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class EngineStart:
    """The times of an engine's start, measured on one GPU with LLMs of `layers` (fewest, most). Times whose
    names end in `layer_s` are per layer: `cached_layer_s` to read compiled kernels, `compile_layer_s` to
    compile them.
    """

    name: str
    gpu: str
    layers: tuple[int, int]
    load_bytes_per_s: float  # The rate at which weights load into one GPU.
    boot_s: float
    trace_layer_s: float
    compile_layer_s: float
    cached_layer_s: float
    profile_s: float
    capture_layer_s: float
    is_measured: bool
    source: str


@dataclass(frozen=True, slots=True)
class SleepLevel:
    """A level of vLLM's sleep mode. At level 1 weights stay in the host's memory, at level 2 they are read
    from storage again. A rate is None where none are copied between host and GPU. A sleeping engine keeps
    `kept_gpu_bytes` of each of its GPUs.

        asleep_s = fall_asleep_s + weights / GPUs / fall_asleep_bytes_per_s
        awake_s = wake_s + weights / GPUs / wake_bytes_per_s          at level 2: wake_s + load_s of a start
    """

    level: int
    wake_s: float
    wake_bytes_per_s: float | None
    fall_asleep_s: float
    fall_asleep_bytes_per_s: float | None
    kept_gpu_bytes: float
    is_measured: bool
    source: str

    @property
    def keeps_weights(self) -> bool:
        """Whether weights stay in the host's memory."""
        return self.wake_bytes_per_s is not None


@dataclass(frozen=True, slots=True)
class StartTime:
    """The seconds of each part of a start; `node_s` is the time until a node is there. `estimated` has one
    phrase for each reason why the start is not simply what was measured.
    """

    image_s: float
    boot_s: float
    load_s: float
    compile_s: float
    profile_s: float
    capture_s: float
    node_s: float = 0.0
    estimated: tuple[str, ...] = ()

    @property
    def start_s(self) -> float:
        """Seconds from the request of a worker until it is ready, the sum of all parts."""
        engine_s = self.compile_s + self.profile_s + self.capture_s
        return self.node_s + self.image_s + self.boot_s + self.load_s + engine_s


def start_time(
    llm: Llm,
    gpus: int,
    engine: EngineStart,
    storage: Storage,
    *,
    pp: int = 1,
    image: Image | None = None,
    is_compiled: bool = False,
    node_s: float = 0.0,
) -> StartTime:
    """The start of a worker of this many GPUs in `pp` stages.

    Without `image` the node has the image already; with `is_compiled` it has the compiled kernels too.
    """
    layers = -(-llm.layers // pp)  # Stages start at the same time, so the longest counts.
    into_gpus_s = llm.weight_bytes / gpus / engine.load_bytes_per_s
    kernel_layer_s = engine.cached_layer_s if is_compiled else engine.compile_layer_s
    # A row that was not measured as a whole was put together from several measurements.
    estimated = [
        f"{row.name}: put together" for row in (storage, image, engine) if row and not row.is_measured
    ]
    if gpus > 1:
        estimated.append(f"{gpus} GPUs: measured on one")
    if not engine.layers[0] <= layers <= engine.layers[1]:
        estimated.append(f"{layers} layers: measured with {engine.layers[0]} to {engine.layers[1]}")
    return StartTime(
        image_s=0.0 if image is None else image.pull_s,
        boot_s=engine.boot_s,
        # Storage and GPUs work at the same time, so the slower one counts.
        load_s=max(llm.weight_bytes / storage.bandwidth_bytes_per_s, into_gpus_s),
        compile_s=layers * (engine.trace_layer_s + kernel_layer_s),
        profile_s=engine.profile_s,
        capture_s=layers * engine.capture_layer_s,
        node_s=node_s,
        estimated=tuple(estimated),
    )
