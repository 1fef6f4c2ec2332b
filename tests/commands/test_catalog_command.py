"""`plan catalog fit` and `llm`: fits of kernel tables, rows of LLMs, in a folder that is a catalog then."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from planner import cli
from planner.documents.catalog import read_catalog
from planner.documents.llm_config import llm_from_config
from planner.importers import silicon_fits

HAS_TABLES = importlib.util.find_spec("aiconfigurator_core") is not None
needs_tables = pytest.mark.skipif(not HAS_TABLES, reason="needs the extra 'silicon'")
Plan = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Plan:
    """The command in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plan", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


@needs_tables
def test_fits_are_made_and_found(plan: Plan) -> None:
    """Experts in slices and whole ones, and on a node of 8 GPUs 2 and 4 ranks of TP 2 that share them."""
    code, out, err = plan(
        *("catalog", "fit", "qwen3-30b-a3b", "--gpu", "b200", "--tp", "2", "-o", "own", "--json")
    )
    assert code == 0, err
    rows = json.loads(out)["fits"]
    assert [(row["gpu"], row["tp"], row["ep"], row["dp"]) for row in rows] == [
        ("b200-180g", 2, False, 1),
        ("b200-180g", 2, True, 1),
        ("b200-180g", 2, True, 2),
        ("b200-180g", 2, True, 4),
    ]
    own = read_catalog(Path("own"))
    llm, gpu = own.llm("qwen3-30b-a3b"), own.gpu("b200")
    found = [own.step_latency(llm, gpu, 2, ep=row["ep"], dp=row["dp"]) for row in rows]
    for row, latency in zip(rows, found, strict=True):
        assert latency.kind == "kernels" and latency.mape_frac == row["mape_frac"]
    assert len(set(found)) == len(rows)


@needs_tables
def test_a_config_of_ones_own_is_fitted_too(plan: Plan) -> None:
    shape = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    rest = {"intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 8192}
    Path("mine").mkdir()
    Path("mine/config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **rest})
    )
    code, out, err = plan("catalog", "fit", "./mine", "--gpu", "h100", "--tp", "1", "-o", "own", "--json")
    assert code == 0, err
    assert [row["gpu"] for row in json.loads(out)["fits"]] == ["h100-80g"]


@needs_tables
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("opt-66b",), "facebook/opt-66b on a100-80g: AIConfigurator's feed-forward blocks are all gated"),
        (("qwen3-8b", "--gpu", "l4"), "Qwen/Qwen3-8B on l4-24g: AIConfigurator lacks kernels of this GPU"),
        (("llama-3.1-70b", "--gpu", "l40s", "--tp", "1"), "tp1: does not fit"),
        (("qwen3-8b", "--gpu", "h900"), "GPU 'h900' is not in"),
        (("qwen-88",), "LLM 'qwen-88' is not in"),
    ],
)
def test_what_cannot_be_fitted_is_one_line(plan: Plan, words: tuple[str, ...], why: str) -> None:
    code, out, err = plan("catalog", "fit", *words, "-o", "own")
    assert (code, out) == (1, "") and why in err and len(err.splitlines()) == 1
    assert not Path("own").exists()


def test_of_several_reasons_memory_is_the_last_to_be_told(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU is too small for it, and more have no kernels: the second is what no other TP mends."""
    reasons = (
        "glm on h100 tp1: does not fit into memory",
        "glm on h100 tp4: AIConfigurator lacks kernels: x",
    )
    monkeypatch.setattr(
        silicon_fits, "silicon_fits", lambda *_, **__: silicon_fits.FittedKernels(None, reasons)
    )
    code, _, err = plan("catalog", "fit", "glm-4.5-air", "--gpu", "h100", "-o", "own")
    assert code == 1 and reasons[1] in err and reasons[0] not in err


def test_without_the_extra_it_says_how_to_get_it(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, None)
    code, _, err = plan("catalog", "fit", "qwen3-8b", "--gpu", "h100", "-o", "own")
    assert code == 1 and "pip install 'fleetplan[silicon]'" in err and len(err.splitlines()) == 1


def test_what_is_no_command_is_a_table(plan: Plan) -> None:
    assert plan("catalog", "show", "gpus") == plan("catalog", "gpus") == plan("catalog")
    code, _, err = plan("catalog", "fits")
    assert code == 1 and "'fits' is not one of gpus, llms, slos, latency, engines" in err


def test_a_config_makes_a_row_that_reads_back(plan: Plan, tmp_path: Path) -> None:
    """The row is the same LLM as the config, and a catalog of one's own takes it as it is printed."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }
    for folder in ("mine", "own"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    code, out, err = plan("catalog", "llm", "mine")
    assert (code, err) == (0, "")
    (tmp_path / "own" / "llms.yaml").write_text(out)
    # The row is named as its folder; an LLM that is served from a folder has the folder's whole path.
    assert read_catalog(tmp_path / "own").llm("mine") == replace(llm_from_config(Path("mine")), name="mine")
    code, out, err = plan("catalog", "llm", "nowhere")
    assert code == 1 and "nowhere" in err and "no such file" in err


def test_every_column_of_what_is_known_is_explained(plan: Plan) -> None:
    """gpt-oss-120b: 116.8 billion parameters; a sequence's windows take 9 blocks of 16; L4 is a roofline."""
    code, out, err = plan(
        "catalog", "support", "gpt-oss-120b", "--gpu", "h100", "--gpu", "l4", "--gpu", "v100"
    )
    assert (code, err) == (0, "")
    for said in (
        "116.8 billion, 4.54 billion of them for a token",
        " 144 ",
        "beside: KV tokens' worth of memory",
        "step times, kernels: sums",
        "step times, roofline: computed",
        "unchecked: no kernels",
        "measured prefills / decodes took at most",
    ):
        assert said in out, said
    code, out, err = plan("catalog", "support", "deepseek-v3", "--gpu", "h200", "--gpu", "l4")
    assert code == 0 and "beside" not in out and "Holds no worker on one node: l4-24g." in out


def test_what_is_known_of_an_llm(plan: Plan) -> None:
    """65.1 GB of gpt-oss leave room on every H100; of DeepSeek-V3's 673 GB on none but eight H200."""
    code, out, err = plan("catalog", "support", "gpt-oss-120b", "--gpu", "h100", "--gpu", "l4", "--json")
    assert code == 0, err
    rows = {(row["gpu"], row["tp"], row["ep"]): row for row in json.loads(out)["on"] if row["dp"] == 1}
    h100 = [(tp, ep) for gpu, tp, ep in rows if gpu == "h100-80g"]
    assert h100 == [(1, False), (2, False), (2, True), (4, False), (4, True), (8, False), (8, True)]
    assert all(rows["h100-80g", tp, ep]["step_times"] == "kernels" for tp, ep in h100)
    assert rows["l4-24g", 8, False]["step_times"] == "roofline" and rows["l4-24g", 8, False]["unchecked"]
    code, out, err = plan("catalog", "support", "deepseek-v3", "--gpu", "h200")
    assert code == 0 and "8 EP" in out
    assert rows["h100-80g", 8, True]["usd_per_h"] == round(8 * read_catalog().gpu("h100").price_usd_per_h, 2)
    code, out, err = plan("catalog", "support", "deepseek-v3", "--gpu", "a100")
    assert (code, out) == (1, "") and "673 GB of weights fit on no node of a100-80g" in err


def test_names_of_llms_stay_whole_on_a_terminal(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 100 columns names were broken into pieces of six letters, and KV bytes read 2.6214e+06."""
    monkeypatch.setenv("COLUMNS", "110")
    code, out, _ = plan("catalog", "llms")
    assert code == 0 and "│ meta-llama/Llama-3.1-70B " in out and "2621440" in out
    assert "KV bytes/token" in " ".join(out.split()) and out.rstrip().endswith("--json")
    monkeypatch.setenv("COLUMNS", "80")  # No column is dropped in silence.
    assert "524288" in plan("catalog", "llms")[1]
