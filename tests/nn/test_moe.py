"""Router, Experts and MoE against a loop over tokens, and as modules of a model."""

import copy
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tokenyard
from tokenyard.nn import Experts, MoE, Router

DOC = (Path(__file__).parents[2] / "docs" / "routers.md").read_text(encoding="utf-8")
F64: dict[str, Any] = {"dtype": torch.float64}
PLAIN = {"normalize": "none"}


def swiglu(z_N: Tensor) -> Tensor:
    gate_I, up_I = z_N.chunk(2)
    return gate_I * gate_I.sigmoid() * up_I


def gpt_oss(z_N: Tensor) -> Tensor:
    gate_I, up_I = z_N[0::2].clamp(max=7), z_N[1::2].clamp(-7, 7)
    return gate_I * (1.702 * gate_I).sigmoid() * (up_I + 1)


def expert(experts: Experts, e: int, x_H: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """One expert on one token, from the parameters by name."""
    p = dict(experts.named_parameters())
    first = "up_proj" if "up_proj" in p else "gate_up_proj"
    w_first, w_down = p[first][e], p["down_proj"][e]
    if experts.weight_layout == "EKN":
        w_first, w_down = w_first.T, w_down.T
    z_N = w_first @ x_H + (p[f"{first}_bias"][e] if f"{first}_bias" in p else 0)
    return w_down @ act(z_N) + (p["down_proj_bias"][e] if "down_proj_bias" in p else 0)


def loop(
    moe: MoE,
    x_TH: Tensor,
    ids_TK: Tensor,
    act: Callable[[Tensor], Tensor] = swiglu,
    capacity: int | None = None,
) -> Tensor:
    """Weights are the softmax over a token's experts; an expert's first `capacity` tokens count."""
    taken, rows = [0] * moe.gate.num_experts, []
    for x_H, ids_K in zip(x_TH, ids_TK.tolist()):
        z_E = moe.gate.weight @ x_H + (0 if moe.gate.bias is None else moe.gate.bias)
        out_H, ids_K = torch.zeros_like(x_H), [e for e in ids_K if 0 <= e < len(z_E)]
        for e in ids_K:
            taken[e] += 1
            if capacity is None or taken[e] <= capacity:
                weight = z_E[e].exp() / sum(z_E[i].exp() for i in ids_K)
                out_H = out_H + weight * expert(moe.experts, e, x_H, act)
        if moe.shared_expert is not None:
            shared = moe.shared_expert
            hidden_I = torch.cat([shared.gate_proj.weight @ x_H, shared.up_proj.weight @ x_H])
            shared_H = shared.down_proj.weight @ swiglu(hidden_I)
            gate = moe.shared_expert_gate
            out_H = out_H + shared_H * (1 if gate is None else (gate.weight @ x_H).sigmoid())
        rows.append(out_H)
    return torch.stack(rows)


GPT_OSS = {"bias": True, "gate_up_layout": "interleaved", "weight_layout": "EKN"}
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "plain": ({}, swiglu),
    "shared": ({"shared_intermediate_size": 7}, swiglu),
    "gated shared": ({"shared_intermediate_size": 7, "shared_gate": True}, swiglu),
    "ungated": ({"activation": "relu2", "experts": {"bias": True}}, lambda z: z.relu() ** 2),
    "EKN": ({"experts": {"weight_layout": "EKN"}}, swiglu),
    "recompute": ({"experts": {"recompute": True, "reduction": "expert"}}, swiglu),
    "capacity": ({"capacity_factor": 0.6}, swiglu),
    "gpt-oss": ({"activation": "clamped_swiglu", "experts": GPT_OSS,
                 "router": {"bias": True, "score": "softmax_of_selected"}}, gpt_oss),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_against_a_loop_over_tokens(variant: str) -> None:
    options, act = VARIANTS[variant]
    moe = MoE(6, 5, 4, 2, **options, **F64)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)  # biases too
    x_BSH = torch.randn(2, 5, 6, **F64, requires_grad=True)
    out_BSH, statistics = moe(x_BSH)
    z_TE = x_BSH.flatten(0, 1) @ moe.gate.weight.T
    z_TE = z_TE if moe.gate.bias is None else z_TE + moe.gate.bias
    ids_TK, capacity = z_TE.topk(2).indices, 3 if variant == "capacity" else None
    assert moe.capacity(10) == capacity  # 0.6 * 10 * 2 / 4
    want_BSH = loop(moe, x_BSH.flatten(0, 1), ids_TK, act, capacity).view(2, 5, 6)
    torch.testing.assert_close(out_BSH, want_BSH, rtol=1e-10, atol=1e-12)
    leaves, d_BSH = [x_BSH, *moe.parameters()], torch.randn(2, 5, 6, **F64)
    got = torch.autograd.grad(out_BSH, leaves, d_BSH)
    want = torch.autograd.grad(want_BSH, leaves, d_BSH)
    for d_got, d_want in zip(got, want):
        torch.testing.assert_close(d_got, d_want, rtol=1e-9, atol=1e-11)

    torch.testing.assert_close(statistics.router_logits, z_TE)
    assert statistics.topk_indices.tolist() == ids_TK.tolist()
    torch.testing.assert_close(statistics.topk_weights.sum(1), torch.ones(10, **F64))
    counts = [min((ids_TK == e).sum().item(), capacity or 20) for e in range(4)]
    assert statistics.tokens_per_expert.tolist() == counts
    assert statistics.num_dropped == 20 - sum(counts)


def test_capacity_drops_the_least_weight() -> None:
    moe = MoE(4, 3, 3, 1, capacity_factor=0.5, drop="weight", router=PLAIN, dtype=torch.float64)
    x_TH, ids_TK = torch.randn(12, 4, **F64), torch.zeros(12, 1, dtype=torch.int64)
    out_TH, statistics = moe(x_TH, ids_TK)
    kept = statistics.topk_weights.flatten().topk(2).indices.tolist()
    assert statistics.tokens_per_expert.tolist() == [2, 0, 0] and statistics.num_dropped == 10
    assert sorted(out_TH.any(1).nonzero().flatten().tolist()) == sorted(kept)


def test_state_dict_names() -> None:
    moe = MoE(6, 5, 4, 2, shared_intermediate_size=7, shared_gate=True,
              router={"selection_bias": True, "bias": True}, experts={"bias": True})  # fmt: skip
    assert {name: tuple(value.shape) for name, value in moe.state_dict().items()} == {
        "gate.weight": (4, 6), "gate.bias": (4,), "gate.e_score_correction_bias": (4,),
        "experts.gate_up_proj": (4, 10, 6), "experts.down_proj": (4, 6, 5),
        "experts.gate_up_proj_bias": (4, 10), "experts.down_proj_bias": (4, 6),
        "shared_expert.gate_proj.weight": (7, 6), "shared_expert.up_proj.weight": (7, 6),
        "shared_expert.down_proj.weight": (6, 7), "shared_expert_gate.weight": (1, 6),
    }  # fmt: skip
    shapes = {n: tuple(p.shape) for n, p in Experts(4, 6, 5, activation="relu").named_parameters()}
    assert shapes == {"up_proj": (4, 5, 6), "down_proj": (4, 6, 5)}
    shapes = {
        n: tuple(p.shape) for n, p in Experts(4, 6, 5, weight_layout="EKN").named_parameters()
    }
    assert shapes == {"gate_up_proj": (4, 6, 10), "down_proj": (4, 5, 6)}
    with pytest.raises(ValueError, match="shared_gate"):
        MoE(6, 5, 4, 2, shared_gate=True)
    with pytest.raises(RuntimeError, match="selection_bias"):
        Router(6, 4, 2).update_selection_bias(torch.zeros(4, dtype=torch.int64))


def test_copies_give_the_same_output() -> None:
    options: dict[str, Any] = {"shared_intermediate_size": 7, "router": {"selection_bias": True}}
    x_TH, moe, loaded = torch.randn(9, 6), MoE(6, 5, 4, 2, **options), MoE(6, 5, 4, 2, **options)
    moe.gate.update_selection_bias(torch.tensor([9, 0, 0, 0]), rate=0.5)
    copied, want_TH = copy.deepcopy(moe), moe(x_TH)[0]
    loaded.load_state_dict(moe.state_dict())
    for parameter in moe.parameters():
        parameter.data.zero_()  # neither copy shares memory with it
    assert torch.equal(copied(x_TH)[0], want_TH) and torch.equal(loaded(x_TH)[0], want_TH)


def test_meta_device(poisoned_memory: None) -> None:
    """After `to_empty`, `reset_parameters` sets everything that the module holds."""
    options: dict[str, Any] = {"router": {"selection_bias": True}, "experts": {"bias": True}}
    moe = MoE(6, 5, 4, 2, device="meta", shared_intermediate_size=7, **options)
    assert all(value.is_meta for value in moe.state_dict().values())
    moe.to_empty(device="cpu")
    for module in moe.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, value in moe.state_dict().items():
        assert value.isfinite().all(), name
        assert value.any() != name.endswith("bias"), name
    assert moe(torch.randn(3, 6))[0].isfinite().all()


@pytest.mark.parametrize("autocast", [False, True])
def test_router_logits_are_fp32(autocast: bool) -> None:
    """In a bf16 model as under autocast, the logits are those of fp32 arithmetic."""
    moe = MoE(64, 32, 8, 2, shared_intermediate_size=16, router={"selection_bias": True})
    moe = moe if autocast else moe.to(torch.bfloat16)
    x_TH = torch.randn(9, 64, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out_TH, statistics = moe(x_TH)
    want_TE = x_TH.double() @ moe.gate.weight.double().T
    assert statistics.router_logits.dtype == statistics.topk_weights.dtype == torch.float32
    torch.testing.assert_close(statistics.router_logits.double(), want_TE, rtol=1e-5, atol=1e-6)
    assert out_TH.dtype == torch.bfloat16
    out_TH.sum().backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype, name


def test_a_selection_bias_moves_in_a_bf16_model() -> None:
    """A step of 1e-3 from 1.0 is lost in bf16; the bias is a count of steps, not an activation."""
    router = Router(6, 3, 1, selection_bias=True).to(torch.bfloat16)
    router.e_score_correction_bias.fill_(1.0)
    router.update_selection_bias(torch.tensor([0, 5, 10]))
    assert router.e_score_correction_bias[0] > 1 > router.e_score_correction_bias[2]


def test_given_indices_and_no_tokens() -> None:
    moe = MoE(6, 5, 4, 2, **F64)
    x_TH, ids_TK = torch.randn(3, 6, **F64), torch.tensor([[3, 0], [-1, 2], [4, -1]])
    out_TH, statistics = moe(x_TH, ids_TK)
    torch.testing.assert_close(out_TH, loop(moe, x_TH, ids_TK))
    assert not out_TH[2].any() and statistics.tokens_per_expert.tolist() == [1, 0, 1, 1]
    for x in (torch.zeros(0, 6, **F64), torch.zeros(2, 0, 6, **F64)):
        out, statistics = moe(x.requires_grad_())
        assert out.shape == x.shape and not statistics.tokens_per_expert.any()
        for gradient in torch.autograd.grad(out.sum(), list(moe.parameters())):
            assert not gradient.any()  # written for every parameter, so that no rank waits


@pytest.mark.parametrize("variant", ["gated shared", "gpt-oss"])
def test_compile(variant: str) -> None:
    moe = MoE(6, 5, 4, 2, **VARIANTS[variant][0])
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        x_TH = torch.randn(tokens, 6, requires_grad=True)
        torch._dynamo.mark_dynamic(x_TH, 0)
        out_TH, want_TH = compiled(x_TH)[0], moe(x_TH)[0]
        torch.testing.assert_close(out_TH, want_TH)
        leaves, d_TH = [x_TH, *moe.parameters()], torch.randn(tokens, 6)
        for got, want in zip(*(torch.autograd.grad(y, leaves, d_TH) for y in (out_TH, want_TH))):
            torch.testing.assert_close(got, want)


def test_training_step_under_checkpointing() -> None:
    moe = MoE(6, 5, 4, 2, capacity_factor=1.0, router={"selection_bias": True, "score": "sigmoid"})
    x_TH, target_TH = torch.randn(12, 6), torch.randn(12, 6)
    optimizer, losses, gradients = torch.optim.AdamW(moe.parameters(), lr=0.02), [], []
    for step in range(30):
        for run in (moe, lambda x: checkpoint(moe, x, use_reentrant=False)):
            optimizer.zero_grad()
            out_TH, statistics = run(x_TH)
            loss = F.mse_loss(out_TH, target_TH)
            loss.backward()
            gradients.append([p.grad.clone() for p in moe.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(gradients[-2], gradients[-1]))
        assert len(gradients[-1]) == 3, step
        losses.append(loss.item())
        optimizer.step()
        moe.gate.update_selection_bias(statistics.tokens_per_expert)
    assert losses[-1] < 0.7 * losses[0]
    assert moe.gate.e_score_correction_bias.any()


SIGMOID = {"score": "sigmoid", "normalize": "sum", "eps": 1e-20, "scale": 2.5}
GROUPS = {"num_groups": 4, "topk_groups": 2, "group_score": "sum_of_top2", "selection_bias": True}
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("MixtralSparseMoeBlock", {}, {}),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock",
                  {"num_experts": 8, "norm_topk_prob": False}, {"router": PLAIN}),
    "olmoe": ("OlmoeSparseMoeBlock", {"num_experts": 8}, {"router": PLAIN}),
    "granitemoe": ("GraniteMoeMoE", {},
                   {"router": {"score": "softmax_of_selected"}}),
    "deepseek_v3": ("DeepseekV3MoE",
                    {"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2},
                    {"shared_intermediate_size": 10, "router": SIGMOID | GROUPS}),
    "qwen2_moe": ("Qwen2MoeSparseMoeBlock",
                  {"num_experts": 8, "shared_expert_intermediate_size": 7},
                  {"shared_intermediate_size": 7, "shared_gate": True, "router": PLAIN}),
    "gpt_oss": ("GptOssMLP", {}, VARIANTS["gpt-oss"][0]),
}  # fmt: skip


@pytest.mark.parametrize("model", BLOCKS)
def test_block_of_transformers(model: str) -> None:
    """Its weights, loaded by name, give its output."""
    transformers = pytest.importorskip("transformers", minversion="5.20")
    name, sizes, options = BLOCKS[model]
    sizes = {"num_local_experts": 8, "moe_intermediate_size": 5, "intermediate_size": 5, **sizes}
    config = transformers.AutoConfig.for_model(
        model, hidden_size=6, num_experts_per_tok=3, experts_implementation="eager", **sizes
    )
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    block, moe, state = getattr(module, name)(config), MoE(6, 5, 8, 3, **options), {}
    for key, value in block.state_dict().items():
        key = key.replace("router.", "gate.").replace("shared_experts.", "shared_expert.")
        state[key] = torch.nn.init.normal_(value, std=0.5)
    moe.load_state_dict(state)
    x_BSH = torch.randn(2, 7, 6)
    want = block(x_BSH)
    torch.testing.assert_close(moe(x_BSH)[0], want[0] if isinstance(want, tuple) else want)


def test_compositions_of_the_documentation() -> None:
    names: dict[str, Any] = {"tokenyard": tokenyard, "torch": torch}
    for block in re.findall(r"^```python\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL):
        exec(block, names)
    experts, x_TH = Experts(4, 6, 5, **F64), torch.randn(9, 6, **F64)
    z_TE, bias_E = torch.randn(9, 7, **F64), torch.rand(7, **F64)
    weights = (experts.gate_up_proj, experts.down_proj)
    llama_TH, longcat_TH = [], []
    for x_H, z_E in zip(x_TH, z_TE):
        e = int(z_E[:4].argmax())
        llama_TH.append(expert(experts, e, z_E[e].sigmoid() * x_H, swiglu))
        p_E = z_E.softmax(0)
        ids = (p_E + bias_E).topk(3).indices.tolist()
        outs = [x_H if e >= 4 else expert(experts, e, x_H, swiglu) for e in ids]
        longcat_TH.append(sum(6 * p_E[e] * out_H for e, out_H in zip(ids, outs)))
    torch.testing.assert_close(names["llama4"](x_TH, z_TE[:, :4], *weights), torch.stack(llama_TH))
    got_TH = names["longcat"](x_TH, z_TE, bias_E, *weights, top_k=3)
    torch.testing.assert_close(got_TH, torch.stack(longcat_TH))


def test_capacity_is_exact_and_exports_for_any_number_of_tokens() -> None:
    assert MoE(4, 8, 1, 1, capacity_factor=1.1).capacity(100) == 110
    assert MoE(4, 8, 3, 2, capacity_factor=1.25).capacity(7) == 6
    moe = MoE(4, 8, 4, 2, capacity_factor=1.25)
    tokens = torch.export.Dim("T", min=2, max=4096)
    exported = torch.export.export(moe, (torch.randn(16, 4),), dynamic_shapes=({0: tokens},))
    x_TH = torch.randn(37, 4)
    torch.testing.assert_close(exported.module()(x_TH)[0], moe(x_TH)[0])


def test_other_options_of_the_router_keep_the_weights_normalised() -> None:
    moe = MoE(6, 5, 4, 2, router={"selection_bias": True})
    _, statistics = moe(torch.randn(9, 6))
    torch.testing.assert_close(statistics.topk_weights.sum(1), torch.ones(9))


def test_jitter_in_training_alone() -> None:
    router = Router(6, 4, 2, jitter=0.1)
    x_TH = torch.ones(50, 6)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4, 6))
    noisy_TE = router(x_TH).router_logits
    assert (noisy_TE - 1).abs().max() <= 0.1 + 1e-6 and noisy_TE.std() > 0.03
    router.eval()
    assert torch.equal(router(x_TH).router_logits, torch.ones(50, 4))


def test_forced_balance_fills_experts_equally_and_yields_to_given_indices() -> None:
    moe = MoE(6, 5, 4, 3, router={"force_balance": True})
    out_TH, statistics = moe(torch.randn(8, 6))
    assert statistics.tokens_per_expert.tolist() == [6, 6, 6, 6]
    assert all(len(set(ids)) == 3 for ids in statistics.topk_indices.tolist())
    out_TH.sum().backward()
    assert moe.gate.weight.grad.any()
    given = torch.zeros(8, 3, dtype=torch.int32)
    given[:, 1:] = -1
    assert torch.equal(moe(torch.randn(8, 6), given)[1].topk_indices, given)


def test_meta_tensors() -> None:
    out, _ = MoE(8, 4, 4, 2, device="meta")(torch.randn(3, 8, device="meta"))
    assert out.shape == (3, 8) and out.is_meta


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Experts(2, 4, 8, activation="swigloo"),
            r"nn\.Experts: `activation`: expected one",
        ),
        (lambda: Experts(2, 4, 8, weight_layout="foo"), r"nn\.Experts: `weight_layout`"),
        (lambda: Router(4, 2, 3), r"nn\.Router: `top_k`: expected 1 to E = 2, got 3"),
        (lambda: Router(4, 2, 1, jitter=1.0), r"nn\.Router: `jitter`: expected 0 to 1"),
        (lambda: Router(4, 2, 1, normalise="sum"), r"`topk_options`: .*got 'normalise'"),
        (lambda: MoE(4, 8, 2, 1, capacity_factor=-1), r"nn\.MoE: `capacity_factor`"),
        (lambda: MoE(4, 8, 2, 1, drop="last"), r"nn\.MoE: `drop`"),
        (lambda: Router(4, 2, 1)(torch.randn(3, 5)), r"nn\.Router: `x`: expected shape \[T, 4\]"),
    ],
)
def test_nonsense_is_refused_early(make: Callable[[], object], message: str) -> None:
    with pytest.raises(tokenyard.ArgumentError, match=message):
        make()
