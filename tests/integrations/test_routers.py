"""nn.Router.from_config against what the routers of transformers hand to their experts."""

from typing import Any

import pytest
import torch
import transformers
from integrations import tiny
from packaging.version import Version
from torch import Tensor, nn

import tokenyard
from tokenyard.nn import Router
from tokenyard.nn.router_configs import _ROUTERS

MODULES = {
    module.split(".")[-2]: module
    for module in sorted({module for module, _ in tiny.decorated()})
    if tiny.has_language_model(module)
}
OTHERS = {  # what `topk` does not express
    "gemma4": "its router reads another input, see docs/routers.md",
    "inkling": "its shared experts are weighed together with the chosen ones",
    "phimoe": "sparsemixer",
    "zaya": "an MLP that also reads the router of the layer before",
    **dict.fromkeys(tiny.MISREAD, "its experts misread it"),
}
NEWER = {"ergo", "kolibri1_1", "minicpm5_moe"} if Version("5.25") > tiny.VERSION else set()
"""Types that this version does not have."""


def parameters_of(block: nn.Module, num_experts: int) -> dict[str, Tensor]:
    """weight, and bias or selection bias, whatever their names, but those of experts."""
    found: dict[str, Tensor] = {}
    for name, value in [*block.named_parameters(), *block.named_buffers()]:
        if name.startswith(("experts.", "shared", "mlp.experts", "mlp.shared")):
            continue
        if value.dim() == 2 and value.shape[0] == num_experts:
            found["weight"] = value
        elif value.numel() == num_experts and value.is_floating_point():
            chooses = "correction" in name or "expert_bias" in name
            found["e_score_correction_bias" if chooses else "bias"] = value.flatten()
    return found


@pytest.mark.parametrize("family", MODULES)
def test_every_language_model(family: str) -> None:
    if family in OTHERS:
        pytest.skip(f"topk does not express it: {OTHERS[family]}")
    model: Any = tiny.model_of(MODULES[family])
    seen = []
    for name, module in model.named_modules():
        if hasattr(type(module), "_apply_gate") and hasattr(module, "config"):
            block = model.get_submodule(name.rpartition(".")[0])
            hook = lambda m, args, kwargs, b=block: seen.append((b, (*args, *kwargs.values())))  # noqa: E731
            module.register_forward_pre_hook(hook, with_kwargs=True)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point():
            with torch.no_grad():
                value.uniform_(0, 0.3) if "bias" in name else value.normal_(std=0.3)
    model(torch.randint(2, 64, (2, 9)), use_cache=False)
    assert seen
    for block, (x_TH, ids_TK, weights_TK, *_) in seen:
        if getattr(block, "is_hash", False) or hasattr(getattr(block, "gate", None), "tid2eid"):
            continue
        if getattr(block, "zero_expert_num", 0):  # whose experts get other ids for identities
            *_, weights_TK, ids_TK = block.router(x_TH)
        router = Router.from_config(model.config.get_text_config())
        state = parameters_of(block, router.num_experts)
        with torch.no_grad():
            router.load_state_dict(state)
        got = router(x_TH.reshape(-1, router.hidden_size).detach())
        order = got.topk_indices.argsort(1)
        wanted = ids_TK.argsort(1)
        assert torch.equal(
            got.topk_indices.gather(1, order).long(), ids_TK.gather(1, wanted).long()
        )
        ours, theirs = got.topk_weights.gather(1, order), weights_TK.gather(1, wanted)
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-6)
        grad = torch.randn_like(ours)
        (d_ours,) = torch.autograd.grad(ours, router.weight, grad)
        (d_theirs,) = torch.autograd.grad(theirs, state["weight"], grad, retain_graph=True)
        torch.testing.assert_close(d_ours, d_theirs, rtol=1e-4, atol=1e-6)


def config(kind: str, **values: Any) -> Any:
    """None where this version has no such type."""
    if kind not in transformers.CONFIG_MAPPING:
        return None
    return transformers.AutoConfig.for_model(kind, **values)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (config("llama4_text", num_local_experts=16), {"num_experts": 16, "top_k": 1, "score": "sigmoid"}),
        (config("jetmoe"), {"num_experts": 8, "top_k": 2, "score": "softmax_of_selected"}),
        (config("longcat_flash"), {"num_experts": 768, "top_k": 12, "selection_bias": True, "scale": 6.0}),
        (config("switch_transformers", num_experts=8), {"num_experts": 8, "top_k": 1, "hidden_size": 768}),
        (config("dbrx"), {"num_experts": 4, "top_k": 1, "normalize": "norm", "norm_p": 1.0}),
        (config("deepseek_v2", topk_method="group_limited_greedy", num_experts_per_tok=6,
                n_group=8, topk_group=3,
                routed_scaling_factor=16.0), {"num_groups": 8, "topk_groups": 3, "scale": 16.0}),
        (config("gemma4_text", num_experts=8, top_k_experts=2), {"normalize": "sum", "top_k": 2}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)  # fmt: skip
def test_models_without_such_experts(given: Any, want: dict[str, Any]) -> None:
    from tokenyard.nn.router_configs import router_options

    if given is None:
        pytest.skip("this version of transformers has no such model")
    options = router_options(given)
    assert {name: options[name] for name in want} == want
    Router.from_config(given, hidden_size=8, device="meta")


@pytest.mark.skipif(Version("5.24") > tiny.VERSION, reason="an older version lacks many")
def test_every_known_type_is_one_of_transformers() -> None:
    assert _ROUTERS.keys() - NEWER <= set(transformers.CONFIG_MAPPING.keys())


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(tokenyard.ArgumentError, match=r"a model_type of afmoe, .*, got 'bert'"):
        Router.from_config(config("bert"))
