"""Low-rank additions of nn.Experts, and the ways in which a layer is run: checkpoints, inference, shards."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tokenyard
from tokenyard.nn import Experts, MoE

LAYOUTS: dict[str, dict[str, Any]] = {
    "standard": {},
    "gpt-oss": {
        "activation": "clamped_swiglu",
        "experts": {"bias": True, "gate_up_layout": "interleaved", "weight_layout": "EKN"},
    },
    "no gate": {"activation": "relu2"},
    "llama4": {"experts": {"weights_on": "input"}, "router": {"score": "sigmoid"}},
}


def made(layout: str) -> MoE:
    return MoE(8, 6, 4, 2, **LAYOUTS[layout], dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_additions_start_at_nothing_train_alone_and_merge(layout: str) -> None:
    moe, x_TH = made(layout), torch.randn(12, 8, dtype=torch.float64)
    before = {name: value.clone() for name, value in moe.experts.state_dict().items()}
    want_TH, _ = moe(x_TH)
    moe.experts.add_lora(3, alpha=6)
    first = "up_proj" if layout == "no gate" else "gate_up_proj"
    added = {f"{name}_lora_{f}" for name in (first, "down_proj") for f in "ab"}
    assert set(moe.experts.state_dict()) == set(before) | added
    assert torch.equal(moe(x_TH)[0], want_TH)
    optimizer = torch.optim.SGD([p for p in moe.experts.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        moe(x_TH)[0].square().mean().backward()
        optimizer.step()
    assert {n for n, p in moe.experts.named_parameters() if p.grad is not None} == added
    assert all(torch.equal(value, moe.experts.state_dict()[name]) for name, value in before.items())
    trained_TH, _ = moe(x_TH)
    assert not torch.allclose(trained_TH, want_TH)
    moe.experts.merge_lora()
    assert set(moe.experts.state_dict()) == set(before)
    torch.testing.assert_close(moe(x_TH)[0], trained_TH, rtol=1e-6, atol=1e-6)


def test_additions_are_refused_twice() -> None:
    experts = Experts(2, 4, 3)
    with pytest.raises(RuntimeError, match="there are no factors"):
        experts.merge_lora()
    with pytest.raises(tokenyard.ArgumentError, match="`rank`: expected at least 1, got 0"):
        experts.add_lora(0)
    experts.add_lora(1)
    with pytest.raises(RuntimeError, match="there already"):
        experts.add_lora(1)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpointing_gives_the_same_gradients(layout: str, reentrant: bool) -> None:
    moe = made(layout)
    moe.experts.add_lora(2)
    torch.nn.init.normal_(moe.experts.down_proj_lora_b)
    x_TH = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)

    def gradients(run: Any) -> list[Tensor]:
        leaves = [x_TH, *(p for p in moe.parameters() if p.requires_grad)]
        for leaf in leaves:
            leaf.grad = None
        run(x_TH).square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    want = gradients(lambda x: moe(x)[0])
    got = gradients(lambda x: checkpoint(lambda x: moe(x)[0], x, use_reentrant=reentrant))
    assert len(got) == 6 and all(map(torch.equal, got, want))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_inference_saves_nothing(context: Any, num_tokens: int) -> None:
    moe, x_TH = made("standard"), torch.randn(num_tokens, 8, dtype=torch.float64)
    want_TH, _ = moe(x_TH)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, context():
        out_TH, _ = moe(x_TH)
    assert saved == [] and out_TH.grad_fn is None and torch.equal(out_TH, want_TH)


def test_compiles_with_additions_and_weights_on_the_input() -> None:
    torch._dynamo.reset()
    moe = made("llama4")
    moe.experts.add_lora(2)
    torch.nn.init.normal_(moe.experts.gate_up_proj_lora_b)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x_TH = torch.randn(9, 8, dtype=torch.float64)
    leaves = [p for p in moe.parameters() if p.requires_grad]
    got_TH, want_TH = compiled(x_TH)[0], moe(x_TH)[0]
    torch.testing.assert_close(got_TH, want_TH)
    grads = torch.autograd.grad(got_TH.sum(), leaves)
    for got, want in zip(grads, torch.autograd.grad(want_TH.sum(), leaves)):
        torch.testing.assert_close(got, want)


def test_fully_sharded_steps_equal_those_of_one_process(tmp_path: Path) -> None:
    """Two processes; see sharded_steps.py."""
    worker = Path(__file__).with_name("sharded_steps.py")
    command = [sys.executable, str(worker), str(tmp_path / "store")]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
