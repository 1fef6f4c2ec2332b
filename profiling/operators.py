"""The operators of an engine step in torch alone, for machines without vLLM.

A layer is what vLLM runs: RMSNorm, QKV projection, rotary embedding, the write into the KV cache, attention,
output projection, RMSNorm, gate and up projection, SiLU times up, down projection. As many layers as fill
`WORKING_BYTES` (at most all) run one after another, so that no cache serves their weights, and their time is
scaled to all layers; embedding, final norm, output projection of the sampled rows and the greedy sample run
once. With tp > 1 the weights are one rank's.

Attention reads each sequence's own slot of one large KV cache, once: prefills by torch's attention (flash on
CUDA) with the new tokens at the end of what they attend to, decodes with the heads of a group as queries.
The time lacks the look-up of pages, which is part of a paged kernel: to gather the pages first would read and
write all of them once more. On CUDA it lacks the work of the host too, because a step is a replayed graph.
Elsewhere the step runs without a graph.

In runs apart from those of the whole step each operator is timed alone (`OPERATORS`, named as in Vidur's
profiles): on CUDA as a graph of its calls in all layers, elsewhere by the clock before and after a call.
torch is optional, so it is imported on use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from planner.documents.llm_feed_forward import is_gated
from planner.errors import InputError
from planner.files.document_values import Section
from planner.models.step_tables import StepShape
from profiling.config import read_config, shard_config, text_of
from profiling.design import StepLimits
from profiling.meter import StepMeasurement, StepRepeats, TimedRun
from profiling.power_sampling import GpuPower

INSTALL = "pip install 'fleetplan[profile]'"
# Bytes of weights that a measurement reads: on a GPU several times those of any cache; on a CPU, whose steps
# take long, fewer.
WORKING_BYTES, CPU_WORKING_BYTES = 512 * 2**20, 64 * 2**20
CPU_KV_BYTES = 2**30  # The largest KV cache on a CPU, whose memory other programs share.
GPU_MEMORY_FRAC = 0.8  # Share of the free memory for weights and KV cache; activations have the rest.
EPS, ROPE_BASE = 1e-5, 10000.0  # Values of Llama 2; other values would take as long.
OPERATORS = (
    "embed",
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_kv_cache_save",
    "attn_prefill",
    "attn_decode",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
    "head",
)
OPERATOR_REPEATS = 3  # Runs of each operator alone, whose median counts.
clock_s = time.perf_counter
RunOperator = Callable[[str, Callable[[], Any]], Any]  # Called with an operator's name and the operator.
StepPart = Callable[..., Any]  # Part of a step, which calls each operator through a `RunOperator`.


def _call_untimed(_: str, call: Callable[[], Any]) -> Any:
    """The `RunOperator` of a run that takes no times: it only calls the operator."""
    return call()


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder LLM, as one rank has it: its layers, and their sizes in numbers of elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    is_gated: bool  # SwiGLU: gate and up projection; else one projection and GELU.
    context_tokens: int

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer without its norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.is_gated else 2) * self.hidden * self.ffn


def shape_of(config: dict[str, Any], where: str) -> DecoderShape:
    """The shape of a dense decoder, from its (sharded) config.json. Raises InputError for other LLMs, and
    where neither the model_type nor the activation tells whether feed-forward blocks have gates.
    """
    text = text_of(config)
    if int(text.get("num_local_experts") or text.get("num_experts") or 1) > 1 or text.get("kv_lora_rank"):
        raise InputError(f"{where}: experts and latent attention need a real engine; use --engine vllm")
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        return DecoderShape(
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            ffn=int(text.get("intermediate_size") or text.get("ffn_dim") or 4 * hidden),
            vocab=int(text["vocab_size"]),
            is_gated=is_gated(Section.from_document(text, where)),
            context_tokens=int(text.get("max_position_embeddings") or 2**31),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: lacks {error}; expected a Hugging Face config.json") from None


class TorchOperators:
    """A `StepMeter` (meter.py) of torch operators. `layers_run` layers are run, their time scaled to all."""

    operators: tuple[str, ...] = OPERATORS

    def __init__(
        self,
        config: Path,
        *,
        tp: int = 1,
        dtype: str = "bfloat16",
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
        max_model_len: int = 32768,
        gpu: GpuPower | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        try:
            import torch
        except ImportError:
            raise InputError(
                f"without vLLM (pip install vllm) profiling needs torch at least: {INSTALL}"
            ) from None
        self._torch: Any = torch
        self._gpu = gpu
        self.shape = shape = shape_of(shard_config(read_config(config), tp), str(config))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._is_cuda = self._device.type == "cuda"
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise InputError(f"--dtype: expected a type of torch such as bfloat16, found {dtype!r}")
        self._dtype = getattr(torch, dtype)
        self._bytes = torch.empty((), dtype=self._dtype).element_size()
        working_bytes = WORKING_BYTES if self._is_cuda else CPU_WORKING_BYTES
        enough_layers = -(-working_bytes // (shape.layer_parameters * self._bytes))
        self.layers_run = min(shape.layers, max(1, enough_layers))
        context = min(max_model_len, shape.context_tokens)
        if kv_tokens is None:
            kv_tokens = self._room_tokens(max_num_seqs * context)
        self.limits = StepLimits(max_num_batched_tokens, max_num_seqs, context, kv_tokens, block_tokens=1)
        self.host_s_meaning = f"0: kernels alone, {self.layers_run} of {shape.layers} layers run" + (
            ", CUDA graphs" if self._is_cuda else ""
        )
        self._make_tensors()

    def measure(self, step: StepShape, *, quick: bool = False) -> StepMeasurement:
        """The median over repeats of the operators of this step."""
        repeats = StepRepeats(step, self._gpu, quick)
        with self._torch.inference_mode():
            layers, rest = self._prepare(step)
            time_layers, time_rest = self._timer(layers), self._timer(rest)
            with repeats.power:
                while repeats.needs_more():
                    t_s = time_layers() * self.shape.layers / self.layers_run + time_rest()
                    # The step was made as asked: no scheduler chose its requests, so there are none to check.
                    repeats.add(TimedRun((), t_s, t_s), [], context=float(step.context))
            measurement = repeats.result()
            return measurement if quick else replace(measurement, operators_s=self._operators_s(layers, rest))

    def _operators_s(self, layers: StepPart, rest: StepPart) -> dict[str, float]:
        """Seconds of each operator in a step of all layers; 0 for operators that do not occur in the step."""
        seconds_by_operator = dict.fromkeys(OPERATORS, 0.0)
        time_operators = self._replayed_s if self._is_cuda else self._in_turn_s
        for part, scale in ((layers, self.shape.layers / self.layers_run), (rest, 1.0)):
            seconds_by_operator |= {name: scale * t_s for name, t_s in time_operators(part).items()}
        return seconds_by_operator

    def _replayed_s(self, part: StepPart) -> dict[str, float]:
        """Seconds of each operator on CUDA: all its calls as one graph, with the inputs that the step gives
        them.
        """
        calls: dict[str, list[Callable[[], Any]]] = {}

        def record(name: str, call: Callable[[], Any]) -> Any:
            calls.setdefault(name, []).append(call)
            return call()

        part(record)
        timers = {
            name: self._timer(lambda calls=calls_of_one: [call() for call in calls])
            for name, calls_of_one in calls.items()
        }
        return {name: median(timer() for _ in range(OPERATOR_REPEATS)) for name, timer in timers.items()}

    def _in_turn_s(self, part: StepPart) -> dict[str, float]:
        """Seconds of each operator on a CPU, called in the order of the step: run alone, one operator's
        weights would stay in the caches.
        """
        runs: list[dict[str, float]] = []

        def timed(name: str, call: Callable[[], Any]) -> Any:
            start_s = clock_s()
            result = call()
            runs[-1][name] = runs[-1].get(name, 0.0) + clock_s() - start_s
            return result

        for _ in range(OPERATOR_REPEATS):
            runs.append({})
            part(timed)
        return {name: median(run[name] for run in runs) for name in runs[0]}

    def close(self) -> None:
        """Give weights and KV cache back to the device."""
        self._kv.clear()
        self._weights.clear()
        if self._is_cuda:
            self._torch.cuda.empty_cache()

    def _room_tokens(self, wanted: int) -> int:
        """The KV tokens that fit into memory in the layers that are run, at most `wanted`."""
        bytes_per_token = 2 * self.shape.kv_heads * self.shape.head_dim * self._bytes * self.layers_run
        if not self._is_cuda:
            return min(wanted, int(CPU_KV_BYTES // bytes_per_token))
        free_bytes, _ = self._torch.cuda.mem_get_info()
        # Embedding and head each have vocab * hidden weights.
        weights = self.shape.layer_parameters * self.layers_run + 2 * self.shape.vocab * self.shape.hidden
        room_bytes = GPU_MEMORY_FRAC * free_bytes - weights * self._bytes
        return min(wanted, int(room_bytes // bytes_per_token))

    def _make_tensors(self) -> None:
        """Random weights and KV cache: zeros would flatter a GPU's clock."""
        torch, s = self._torch, self.shape
        generator = torch.Generator(self._device).manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Any:
            tensor = torch.empty(*shape, device=self._device, dtype=self._dtype)
            return tensor.normal_(0.0, scale, generator=generator)

        def layer() -> dict[str, Any]:
            scale = s.hidden**-0.5
            width = s.head_dim * (s.heads + 2 * s.kv_heads)
            return {
                "norm": random(s.hidden),
                "norm2": random(s.hidden),
                "qkv": random(width, s.hidden, scale=scale),
                "o": random(s.hidden, s.heads * s.head_dim, scale=scale),
                "up": random((2 if s.is_gated else 1) * s.ffn, s.hidden, scale=scale),
                "down": random(s.hidden, s.ffn, scale=s.ffn**-0.5),
            }

        self._weights: Any = [layer() for _ in range(self.layers_run)]
        self._head, self._embedding = random(s.vocab, s.hidden), random(s.vocab, s.hidden)
        self._final_norm = random(s.hidden)
        size = self.limits.kv_tokens + 1
        self._kv: Any = [
            (random(size * s.kv_heads * s.head_dim), random(size * s.kv_heads * s.head_dim))
            for _ in range(self.layers_run)
        ]
        inverse = ROPE_BASE ** (-torch.arange(0, s.head_dim, 2, device=self._device).float() / s.head_dim)
        angles = torch.arange(self.limits.context_tokens, device=self._device).float()[:, None] * inverse
        self._cos, self._sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def _prepare(self, step: StepShape) -> tuple[Any, Any]:
        """Two `StepPart`s of this step: its layers, and the rest (embedding, final norm, head, sample)."""
        torch, s = self._torch, self.shape
        prompts, new, cached, decodes, context = step
        prefilled = prompts * new
        tokens, rows = prefilled + decodes, prompts + decodes
        positions = [torch.arange(cached, cached + new).repeat(prompts)] if prompts else []
        positions += [torch.full((decodes,), context - 1)] if decodes else []
        position = torch.cat(positions).to(self._device)  # The position of each token in its sequence.
        x = torch.empty(tokens, s.hidden, device=self._device, dtype=self._dtype).normal_()
        ids = torch.randint(s.vocab, (tokens,), device=self._device)
        # Every sequence samples one row. Which rows makes no difference to the time, so these are the last.
        sampled = torch.arange(tokens - rows, tokens, device=self._device)
        cos, sin = self._cos[position][:, None], self._sin[position][:, None]
        mask = None
        if prompts and cached:
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(new, cached + new)

        def layers(run_operator: RunOperator = _call_untimed) -> Any:
            y = x
            for weights, (keys, values) in zip(self._weights, self._kv, strict=True):
                y = self._layer(y, weights, (keys, values), step, (cos, sin), mask, run_operator)
            return y

        f = torch.nn.functional

        def rest(run_operator: RunOperator = _call_untimed) -> Any:
            y = run_operator("embed", lambda: f.embedding(ids, self._embedding))[sampled]
            return run_operator(
                "head",
                lambda: (
                    f.linear(f.rms_norm(y, (s.hidden,), self._final_norm, EPS), self._head)
                    .float()
                    .argmax(dim=-1)
                ),
            )

        return layers, rest

    def _layer(
        self,
        x: Any,
        w: dict[str, Any],
        kv: tuple[Any, Any],
        step: StepShape,
        angles: tuple[Any, Any],
        mask: Any,
        run_operator: RunOperator = _call_untimed,
    ) -> Any:
        """The output (tokens, hidden) of one layer with weights `w` for its input x (tokens, hidden)."""
        f, s, torch = self._torch.nn.functional, self.shape, self._torch
        normed = run_operator("input_layernorm", lambda: f.rms_norm(x, (s.hidden,), w["norm"], EPS))
        qkv = run_operator("attn_pre_proj", lambda: f.linear(normed, w["qkv"])).view(len(x), -1, s.head_dim)
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        turned = run_operator("attn_rope", lambda: [_rotated(torch, x, *angles) for x in (q, k)])
        attended = self._attention(turned[0], turned[1], v, kv, step, mask, run_operator)
        projected = run_operator("attn_post_proj", lambda: f.linear(attended, w["o"]))
        y = run_operator("add", lambda: x + projected)
        normed2 = run_operator(
            "post_attention_layernorm", lambda: f.rms_norm(y, (s.hidden,), w["norm2"], EPS)
        )
        up = run_operator("mlp_up_proj", lambda: f.linear(normed2, w["up"]))
        active = run_operator("mlp_act", lambda: _gated(f, up) if s.is_gated else f.gelu(up))
        down = run_operator("mlp_down_proj", lambda: f.linear(active, w["down"]))
        return run_operator("add", lambda: y + down)

    def _attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        kv: tuple[Any, Any],
        step: StepShape,
        mask: Any,
        run_operator: RunOperator,
    ) -> Any:
        """Write new keys and values into the cache, then compute the prompts' attention and the decodes'. In
        the flat cache the prompts' slots come first, then the decodes'.
        """
        f, s, (keys, values) = self._torch.nn.functional, self.shape, kv
        prompts, new, cached, decodes, context = step
        prefilled = prompts * new
        outputs = []
        if prompts:
            used = prompts * (cached + new) * s.kv_heads * s.head_dim
            slots = (prompts, s.kv_heads, cached + new, s.head_dim)
            past_k, past_v = keys[:used].view(slots), values[:used].view(slots)
            by_prompt = (prompts, new, -1, s.head_dim)

            def save() -> None:
                past_k[:, :, cached:] = k[:prefilled].view(by_prompt).transpose(1, 2)
                past_v[:, :, cached:] = v[:prefilled].view(by_prompt).transpose(1, 2)

            def prefill() -> Any:
                queries = q[:prefilled].view(by_prompt).transpose(1, 2)
                masking: Any = {"is_causal": True} if mask is None else {"attn_mask": mask}
                out = f.scaled_dot_product_attention(
                    queries, past_k, past_v, enable_gqa=s.heads != s.kv_heads, **masking
                )
                return out.transpose(1, 2).reshape(prefilled, -1)

            run_operator("attn_kv_cache_save", save)
            outputs.append(run_operator("attn_prefill", prefill))
        if decodes:
            start = prompts * (cached + new) * s.kv_heads * s.head_dim
            end = start + decodes * context * s.kv_heads * s.head_dim
            slots = (decodes, s.kv_heads, context, s.head_dim)
            seen_k, seen_v = (cache[start:end].view(slots) for cache in (keys, values))

            def save_last() -> None:
                seen_k[:, :, -1], seen_v[:, :, -1] = k[prefilled:], v[prefilled:]

            def decode() -> Any:
                queries = q[prefilled:].reshape(decodes, s.kv_heads, -1, s.head_dim)
                return f.scaled_dot_product_attention(queries, seen_k, seen_v).reshape(decodes, -1)

            run_operator("attn_kv_cache_save", save_last)
            outputs.append(run_operator("attn_decode", decode))
        return outputs[0] if len(outputs) == 1 else self._torch.cat(outputs)

    def _timer(self, run: Any) -> Callable[[], float]:
        """A function that runs `run` once and returns its seconds; as a CUDA graph where there is CUDA."""
        torch = self._torch
        run()  # The first run loads kernels, so it is neither timed nor recorded.
        if not self._is_cuda:

            def timed() -> float:
                start_s = clock_s()
                run()
                return clock_s() - start_s

            return timed
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()  # The first replay uploads the graph.
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def replayed() -> float:
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

        return replayed


def _gated(f: Any, up: Any) -> Any:
    """SiLU of the gate times the up projection."""
    gate, up = up.chunk(2, dim=-1)
    return f.silu(gate) * up


def _rotated(torch: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding: the halves of each head as real and imaginary part."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
