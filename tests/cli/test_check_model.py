"""tokenyard check-model: the table, what it takes for a model, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from typer.testing import CliRunner

from tokenyard.cli.main import app
from tokenyard.integrations import transformers as switch


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["check-model", *arguments])


@pytest.mark.parametrize("kind, how", [("qwen3_moe", "swiglu"), ("deepseek_v4", "own gate")])
def test_a_model_type(kind: str, how: str) -> None:
    result = run(kind, "--tokens", "9")
    assert result.exit_code == 0, result.output
    assert result.output.count(how) == 2
    assert "layers.0" in result.output and "layers.1" in result.output
    assert "at tiny sizes differs by" in result.output


def test_a_folder_its_config_and_the_model_in_it(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        result = run(name)
        assert result.exit_code == 0 and "layers.2" not in result.output
    result = run(str(tmp_path), "--full")
    assert result.exit_code == 0, result.output
    assert "layers.2" in result.output and "tiny" not in result.output


def test_a_difference_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = switch.experts_forward
    monkeypatch.setattr(switch, "experts_forward", lambda *args: 1.1 * right(*args))
    try:
        result = run("qwen3_moe")
    finally:
        monkeypatch.undo()
        switch.register()
    assert result.exit_code == 1 and "is allowed for torch.float32" in result.output


def test_the_text_part_of_a_vision_language_model() -> None:
    result = run("qwen3_5_moe", "--tokens", "9")
    assert result.exit_code == 0, result.output
    assert "Qwen3_5MoeForCausalLM, at tiny sizes" in result.output


@pytest.mark.parametrize(
    "name, kind", [("qwen3_vl_moe", "Qwen3VLMoeTextModel"), ("glm4v_moe", "Glm4vMoeTextModel")]
)
def test_a_text_part_without_a_head(name: str, kind: str) -> None:
    result = run(name, "--tokens", "9")
    assert result.exit_code == 0, result.output
    assert f"output of {kind}, at tiny sizes differs" in result.output


@pytest.mark.parametrize(
    "name, message",
    [
        ("nonsense", "cannot make a model of nonsense: there is no such file or folder"),
        ("./no/such/folder", "there is no such file or folder"),
        ("bert", "has no experts"),
        ("qwen3_omni_moe", "has no language model for qwen3_omni_moe_text"),
        ("qwen3_moe --full", "--full takes a folder with weights"),
    ],
)
def test_refusals(name: str, message: str) -> None:
    result = run(*name.split())
    assert result.exit_code == 1 and message in result.output and len(result.output) < 400
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "text", ['{"model_type": ', "[1]", '{"model_type": "qwen3_moe", "hidden_act": "zilu"}']
)
def test_a_config_that_cannot_be_used(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for options in ([], ["--full"]):
        result = run(str(tmp_path), *options)
        assert result.exit_code == 1 and "cannot make a model of" in result.output
        assert isinstance(result.exception, SystemExit)
