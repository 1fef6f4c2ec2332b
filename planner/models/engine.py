"""What an engine adds to the GPUs' seconds of a step, and how it schedules.

    host     h = h0 + h1 D + h2 log2 TP         scheduler, sampler, detokenizer; D sequences in the step
    sync     t = g + h                          a step begins when the host has seen the last one's tokens
    async    t = max(g, h) + r                  the next step is formed when this one begins, so a request
                                                that arrives later is not in it; r has the form of h, and is
                                                host time that overlaps with no step

SGLang computes prompts outside of CUDA graphs, so its host launches the kernels of every layer. For layers of
latent attention and of states, which have many kernels, that takes long: in a step with prompts h is longer
by k for each such layer, on Blackwell by BLACKWELL_LAUNCH_FRAC of k. Where steps are not `mixed_steps`, a
step is of prompts or of decodes, and prompts go first. In vLLM k is 0, and steps are mixed.

SGLang's scheduler can look for new requests only every `poll_steps` steps of decodes
(--scheduler-recv-interval; planner/simulator/polling.py). After a step with prompts, and without work, it
looks at once. Hand-offs do not wait for it here.

g is the GPUs' seconds (`planner.models.latency`). A request reaches its worker `front_end_s` after it
arrives. On the way an API server (one per data-parallel rank) tokenises one prompt after the other, in
`prompt_token_s` for each token of a prompt, cached or not. It passes on at most `tokens_per_s` tokens of
answers, so t >= D / tokens_per_s.

`hand_off_s` after its prefill a request reaches the API server of its decode worker, which tokenises the
prompt once more before the worker asks for the KV; with 0 the worker asks at once. The first request that a
pair of workers hands over takes `first_hand_off_s` more, because the two must connect. With `first_token`
"decode" the client does not get the token that a prefill worker makes: the decode worker computes the
prompt's last token again and sends the whole answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner.errors import InputError

FirstToken = Literal["prefill", "decode"]

NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}  # The engines' names in reports.
BLACKWELL = ("b200-180g", "b300-288g", "gb200-186g", "gb300-279g")  # GPUs of gpus.yaml.
# Fitted to 33 runs of DeepSeek-R1 in nvfp4 on B200 with SGLang 0.5.9, as k is to 13 on H200.
BLACKWELL_LAUNCH_FRAC = 0.65
DEPLOYED_VERSION = "0.33.0"  # The version of vLLM in manifests that name no other.


def _check_seconds(times: HostTime | Engine, keys: Sequence[str]) -> None:
    """Raise InputError where one of the fields `key`_s is no finite number >= 0."""
    for key in keys:
        if not 0 <= (value := getattr(times, f"{key}_s")) < math.inf:
            raise InputError(f"{key} is {value:g} s, must be a number >= 0")


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds per step: `step_s` + `sequence_s` D + `log2_tp_s` log2 TP."""

    step_s: float = 0.0
    sequence_s: float = 0.0
    log2_tp_s: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self, ("step", "sequence", "log2_tp"))

    def per_step_s(self, tp: int) -> tuple[float, float]:
        """Seconds per step and per sequence with `tp` GPUs."""
        return self.step_s + self.log2_tp_s * math.log2(tp), self.sequence_s

    def with_longer_times(self, longer_frac: float) -> HostTime:
        """The same host if all of its time were longer by this share."""
        factor = 1 + longer_frac
        return HostTime(self.step_s * factor, self.sequence_s * factor, self.log2_tp_s * factor)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's host times and how it schedules. `host` is h above, `rest` is r, and the other times have
    the names of the module's docstring. `basis` says where the constants come from; `is_nearest` marks
    constants of another version than the one that runs.
    """

    name: str
    version: str
    async_scheduling: bool
    host: HostTime = HostTime()
    rest: HostTime = HostTime()
    front_end_s: float = 0.0
    basis: str = ""
    is_nearest: bool = False
    tokens_per_s: float = math.inf
    # False for engines that nobody has compared with the simulator, which models vLLM.
    is_checked: bool = True
    prompt_token_s: float = 0.0
    # The way of a request from its prefill worker over the router to its decode worker.
    hand_off_s: float = 0.0
    first_hand_off_s: float = 0.0
    # Which of the two workers sends the first token to the client: "prefill" or "decode".
    first_token: FirstToken = "prefill"
    # k of the module's docstring.
    latent_launch_s: float = 0.0
    mixed_steps: bool = True
    poll_steps: int = 1

    def __post_init__(self) -> None:
        _check_seconds(self, ("front_end", "prompt_token", "hand_off", "first_hand_off", "latent_launch"))
        if not self.tokens_per_s > 0:
            raise InputError(f"tokens_per_s is {self.tokens_per_s:g}, must be > 0")
        if self.poll_steps < 1 or (self.poll_steps > 1 and not self.async_scheduling):
            raise InputError(
                f"poll_steps is {self.poll_steps}, must be 1, or more with asynchronous scheduling"
            )

    @property
    def unhidden_time(self) -> HostTime:
        """What the engine adds to a step that takes the GPUs longer than the host."""
        return self.rest if self.async_scheduling else self.host

    def with_longer_host(self, longer_frac: float) -> Engine:
        """The same engine if its host took longer by this share."""
        return replace(
            self,
            host=self.host.with_longer_times(longer_frac),
            rest=self.rest.with_longer_times(longer_frac),
            latent_launch_s=self.latent_launch_s * (1 + longer_frac),
        )

    def with_longer_front_end(self, factor: float) -> Engine:
        """The same engine if requests took `factor` times as long on their way to it, tokeniser included, and
        the launches of their prompts, too.
        """
        return replace(
            self,
            front_end_s=factor * self.front_end_s,
            prompt_token_s=factor * self.prompt_token_s,
            latent_launch_s=factor * self.latent_launch_s,
        )

    @property
    def pulls_kv(self) -> bool:
        """Whether decode workers pull KV, each with the next step that has a seat and blocks for it. SGLang's
        decode workers reserve blocks before the prefill, and the prefill worker then sends the KV.
        """
        return self.name != "sglang"

    @property
    def title(self) -> str:
        """The name for reports, for instance "vLLM 0.15.1, asynchronous scheduling"."""
        kind = "asynchronous" if self.async_scheduling else "synchronous"
        return f"{NAMES.get(self.name, self.name)} {self.version}, {kind} scheduling"


def vllm_version_of(engine: Engine | None) -> str:
    """The version of vLLM by which a worker's memory is counted; the deployed one for other engines."""
    return engine.version if engine is not None and engine.name == "vllm" else DEPLOYED_VERSION
