"""The profiler's operators of torch on the CPU. `make test-vllm` runs them: torch comes with vLLM."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import InputError
from planner.models.step_tables import StepShape
from profiling.collectives import all_reduces
from profiling.measure import Budget, measure_into

TINY = Path(__file__).parents[2] / "examples" / "tiny-llm"
HEADER = {
    "llm": "tiny",
    "gpu": "none",
    "tp": "1",
    "dtype": "float32",
    "engine": "torch",
    "date": "2026-11-28",
}


def torch_or_skip() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed (pip install 'fleetplan[profile]')")


def test_operators_compute_a_decoder_layer() -> None:
    """A prompt of 5 after 3 cached tokens and two decodes at 4, against attention written out in float64."""
    torch = torch_or_skip()
    from profiling.operators import TorchOperators

    meter = TorchOperators(
        TINY, dtype="float32", max_num_batched_tokens=64, max_num_seqs=4, max_model_len=128
    )
    step, s, w = StepShape(1, 5, 3, 2, 4), meter.shape, meter._weights[0]
    keys, values = (cache.clone() for cache in meter._kv[0])
    x = torch.randn(7, s.hidden)
    position = torch.tensor([3, 4, 5, 6, 7, 3, 3])
    cos, sin = meter._cos[position][:, None], meter._sin[position][:, None]
    from torch.nn.attention.bias import causal_lower_right

    with torch.inference_mode():
        found = meter._layer(x, w, (keys, values), step, (cos, sin), causal_lower_right(5, 8))

    def norm(v: Any, weight: Any) -> Any:
        return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()

    qkv = (norm(x.double(), w["norm"]) @ w["qkv"].double().T).view(7, -1, s.head_dim)
    q = qkv[:, : s.heads]
    a, b = q.chunk(2, dim=-1)
    q = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    size = s.kv_heads * s.head_dim
    starts = [(0, 8), (8 * size, 4), (12 * size, 4)]  # where each sequence's slot begins, and its tokens
    out = torch.empty(7, s.heads, s.head_dim, dtype=torch.float64)
    for row in range(7):
        begin, tokens = starts[0] if row < 5 else starts[row - 4]
        slot = (s.kv_heads, tokens, s.head_dim)
        k = keys[begin : begin + tokens * size].view(slot).double()
        v = values[begin : begin + tokens * size].view(slot).double()
        seen = 4 + row if row < 5 else 4
        for head in range(s.heads):
            kv = head // (s.heads // s.kv_heads)
            share = torch.softmax(k[kv, :seen] @ q[row, head] / s.head_dim**0.5, dim=0)
            out[row, head] = share @ v[kv, :seen]
    y = x.double() + out.view(7, -1) @ w["o"].double().T
    gate, up = (norm(y, w["norm2"]) @ w["up"].double().T).chunk(2, dim=-1)
    y = y + (torch.nn.functional.silu(gate) * up) @ w["down"].double().T
    assert torch.allclose(found.double(), y, rtol=1e-3, atol=1e-3)


def test_operators_are_profiled_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seconds of the thread's own, so that other programs do not count."""
    torch_or_skip().set_num_threads(1)
    from profiling import operators as meters
    from profiling.operators import OPERATORS, TorchOperators

    monkeypatch.setattr(meters, "clock_s", time.thread_time)

    config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    meter = TorchOperators(tmp_path, tp=2, max_num_batched_tokens=128, max_num_seqs=4, max_model_len=256)
    assert (meter.shape.heads, meter.shape.kv_heads) == (4, 2)
    table = measure_into(tmp_path / "t.csv", meter, HEADER, Budget(5), extra_s=lambda tokens: 1e-5 * tokens)
    assert (table.y > 0).all() and (table.steps.host_s == 0).all()
    operators = table.operators
    assert operators is not None and list(operators) == [*OPERATORS, "all_reduce"]
    assert (operators[["attn_pre_proj", "mlp_down_proj", "head"]] > 0).all(axis=None)
    assert ((operators.attn_prefill > 0) == (table.steps.n_prefill > 0)).all()
    assert ((operators.attn_decode > 0) == (table.steps.n_decode > 0)).all()
    assert operators.all_reduce.to_numpy() == pytest.approx(1e-5 * table.X[:, 0], rel=1e-4)
    steps_s = table.y - operators.all_reduce.to_numpy()
    sums_s = operators.drop(columns="all_reduce").sum(axis=1).to_numpy()
    assert 0.5 < np.median(sums_s / steps_s) < 2  # two timings of the same work
    meter.close()


def test_modules_are_timed_by_name_between_start_and_stop() -> None:
    """Two layers that sleep 2 ms in qkv_proj and 4 ms in a gate that Vidur does not know: summed over layers,
    and only of what runs between start and stop."""
    torch = torch_or_skip()
    from profiling.modules import ModuleTimes

    class Sleeps(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: object) -> object:
            time.sleep(self.seconds)
            return x

    layers = [torch.nn.ModuleDict({"qkv_proj": Sleeps(0.002), "gate": Sleeps(0.004)}) for _ in range(2)]
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})

    def run() -> None:
        for layer in layers:
            layer["gate"](layer["qkv_proj"](1))

    times = ModuleTimes(model)
    run()
    times.start()
    run()
    found = times.stop()
    run()
    assert list(found) == ["attn_pre_proj", "gate"]
    assert found["attn_pre_proj"] == pytest.approx(0.004, rel=0.5)
    assert found["gate"] == pytest.approx(0.008, rel=0.5)


@pytest.mark.slow
def test_all_reduces_are_timed_between_processes() -> None:
    """Two ranks by gloo: a thousand times the tokens take longer, and no rank is left behind."""
    torch = torch_or_skip()
    if torch.cuda.is_available():
        pytest.skip("NCCL's turn")
    found = all_reduces(ranks=2, hidden=256, dtype="bfloat16", most_tokens=1000)
    assert found is not None and found.backend == "gloo" and found.bytes_per_token == 512
    assert found.tokens.tolist() == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert found.once_s(1000) > found.once_s(1) > 0
    with pytest.raises(InputError, match="all-reduces between 2 ranks cannot be timed"):
        all_reduces(ranks=2, hidden=256, dtype="no_such_type", most_tokens=2)
