"""The experts of every model of transformers, against their own eager forward; and the ways to switch."""

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations import tiny
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import tokenyard
from tokenyard.integrations import transformers as switch

CLASSES = dict((name, module) for module, name in tiny.decorated())
MODULES = sorted({module for module, _ in tiny.decorated()})
UNKNOWN = {  # classes with a gate of their own, or a norm after each expert
    *("BeamExperts", "DeepseekV4Experts", "Glm5NextTextExperts", "HYV4Experts", "HYV4VLExperts"),
    *("Inkling2Experts", "Inkling2LoopExperts", "MiniMaxM3VLExperts", "MuseSparkExperts"),
    "OpenAIPrivacyFilterExperts",
    *(("BailingHybridExperts", "Step3p7Experts") if Version("5.25") <= tiny.VERSION else ()),
}
ONE_ROUTE = {"ErgoExpertProjections"}
"""Take one row a choice, unweighted, from the class that inherits them; whole models test both."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The classes of the experts that ran by Tokenyard: those that transformers decorates."""
    names: list[str] = []

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        bases = [base.__name__ for base in type(self).__mro__]
        names.append(next((name for name in bases if name in CLASSES), bases[0]))
        return original(self, *args, **kwargs)

    original = switch.experts_forward
    monkeypatch.setattr(switch, "experts_forward", counted)
    yield names
    monkeypatch.undo()
    switch.register()


def close(got: Tensor, want: Tensor) -> None:
    scale = float(want.detach().abs().max().clamp(min=1e-3))
    torch.testing.assert_close(got / scale, want / scale, rtol=1e-5, atol=1e-5)


def choices(num_tokens: int, num_experts: int) -> tuple[Tensor, Tensor]:
    top_k = min(2, num_experts)
    ids_TK = torch.rand(num_tokens, num_experts).topk(top_k).indices
    return ids_TK, torch.rand(num_tokens, top_k)


def results(forward: Callable[..., Tensor], experts: Any, x_TH: Tensor, *args: Tensor) -> Any:
    """Output, and gradients of x, the routing weights and all parameters."""
    leaves = [x_TH.requires_grad_(), args[1].requires_grad_(), *experts.parameters()]
    out_TH = forward(experts, x_TH, *args)
    grad_TH = torch.linspace(-1, 1, out_TH.numel()).view_as(out_TH)
    return [out_TH, *torch.autograd.grad(out_TH, leaves, grad_TH, materialize_grads=True)]


def eager(experts: Any, *args: Tensor) -> Tensor:
    return type(experts).forward.__wrapped__(experts, *args)  # what the decorator found


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - ONE_ROUTE))
def test_every_experts_class(name: str) -> None:
    experts: Any = tiny.experts_of(CLASSES[name], name)
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    inputs = torch.randn(9, hidden), *choices(9, experts.down_proj.shape[0])
    got = results(switch.experts_forward, experts, *inputs)
    for ours, theirs in zip(got, results(eager, experts, *inputs)):
        close(ours, theirs)
    assert (switch.known_activation(experts) is None) == (name in UNKNOWN)


@pytest.mark.parametrize(
    "name", sorted({"MixtralExperts", "GptOssExperts", "DeepseekV4Experts"} & CLASSES.keys())
)
def test_choices_of_other_ranks_and_no_tokens(name: str) -> None:
    """Exact zeros wherever the id is the number of experts."""
    experts: Any = tiny.experts_of(CLASSES[name], name)
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    ids_TK, weights_TK = choices(9, 4)
    ids_TK[2], ids_TK[5, 1] = 4, 4
    x_TH = torch.randn(9, hidden)
    out_TH, d_x_TH, d_weights_TK, *_ = results(
        switch.experts_forward, experts, x_TH, ids_TK, weights_TK
    )
    assert not out_TH[2].any() and not d_x_TH[2].any() and not d_weights_TK[2].any()
    assert d_weights_TK[5, 1] == 0 and d_x_TH[5].any()
    empty = results(switch.experts_forward, experts, x_TH[:0], ids_TK[:0], weights_TK[:0])
    assert empty[0].shape == (0, hidden) and not any(value.any() for value in empty)


@pytest.mark.parametrize("module", MODULES)
def test_every_causal_language_model(module: str, calls: list[str]) -> None:
    model: Any = tiny.model_of(module)
    if module.split(".")[-2] in tiny.MISREAD:
        pytest.skip("its router and its experts disagree in this version of transformers")
    if model is None:
        pytest.skip("has no causal language model of its own; its experts are tested alone")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._experts_implementation = "eager"
    ids = torch.randint(2, 64, (2, 7))

    def run() -> list[Tensor]:
        logits = model(ids, use_cache=False).logits
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(
            logits.float().square().mean(), parameters, materialize_grads=True
        )
        return [logits, *grads]

    try:
        want = run()
    except ValueError as error:
        if "kernels are not available" not in str(error):
            raise
        pytest.skip(f"runs on a GPU alone in this version of transformers: {error}")
    assert calls == []
    switch.use(model)
    got = run()
    assert set(calls) <= CLASSES.keys() and calls
    for ours, theirs in zip(got, want):
        close(ours, theirs)


def qwen3() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.skipif(Version("5.7") > tiny.VERSION, reason="names of others are refused; see use()")
def test_one_line(tmp_path: Path, calls: list[str]) -> None:
    switch.register()
    model = qwen3()
    model.save_pretrained(tmp_path)
    ids = torch.randint(64, (2, 9))
    model.set_experts_implementation("eager")
    want = model(ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="tokenyard")
    close(loaded(ids).logits, want)
    assert len(calls) == 2
    model.set_experts_implementation("tokenyard")
    close(model(ids).logits, want)
    assert len(calls) == 4


def test_generate_compile_and_gradient_checkpointing(calls: list[str]) -> None:
    model, ids = qwen3(), torch.randint(64, (1, 5))
    model.set_experts_implementation("eager")
    options = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(ids, **options)
    switch.use(model)
    assert torch.equal(model.generate(ids, **options), want)
    assert len(calls) == 2 * 6  # once a layer, of the prompt and then of single tokens

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(ids).logits, model(ids).logits)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    model.train()
    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, gradients(), plain))


class LowRank(nn.Module):
    """What PEFT's `target_parameters` puts before a parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(weight.shape[0], 2, weight.shape[2]))
        self.b = nn.Parameter(torch.randn(weight.shape[0], weight.shape[1], 2))
        self.reads = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.reads += 1
        return weight + 0.1 * self.b @ self.a


def test_parametrized_weights_are_read_once_and_trained() -> None:
    experts: Any = tiny.experts_of(CLASSES["MixtralExperts"], "MixtralExperts")
    experts.requires_grad_(False)
    additions = {name: LowRank(getattr(experts, name)) for name in ("gate_up_proj", "down_proj")}
    for name, addition in additions.items():
        parametrize.register_parametrization(experts, name, addition)
        addition.reads = 0
    x_TH, choice = torch.randn(9, 16), choices(9, 4)
    out_TH = switch.experts_forward(experts, x_TH, *choice)
    assert [addition.reads for addition in additions.values()] == [1, 1]
    factors = [factor for addition in additions.values() for factor in (addition.a, addition.b)]
    grads = torch.autograd.grad(out_TH.square().sum(), factors)
    with torch.no_grad():
        want_TH = eager(experts, x_TH, *choice)
    close(out_TH.detach(), want_TH)
    assert all(grad.any() for grad in grads)


def test_a_gate_that_only_looks_like_one_is_called() -> None:
    module: Any = importlib.import_module(CLASSES["MixtralExperts"])

    class Halved(module.MixtralExperts):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up / 2

    class Mine(nn.SiLU):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * x

    plain: Any = tiny.experts_of(CLASSES["MixtralExperts"], "MixtralExperts")
    halved = Halved(plain.config)
    halved.load_state_dict(plain.state_dict())
    x_TH, choice = torch.randn(9, 16), choices(9, 4)
    half_TH = eager(plain, x_TH, *choice) / 2  # whose own forward calls no gate
    close(switch.experts_forward(halved, x_TH, *choice), half_TH)
    assert switch.known_activation(halved) is None
    plain.act_fn = Mine()
    close(switch.experts_forward(plain, x_TH, *choice), eager(plain, x_TH, *choice))
    gpt_oss: Any = tiny.experts_of(CLASSES["GptOssExperts"], "GptOssExperts")
    assert switch.known_activation(gpt_oss) == "clamped_swiglu"
    gpt_oss.limit = 5.0
    assert switch.known_activation(gpt_oss) is None


@pytest.mark.skipif(
    find_spec("transformers.distributed.expert_parallel") is None,
    reason="this version of transformers has no implementations of expert parallelism",
)
def test_expert_parallelism_of_transformers(tmp_path: Path) -> None:
    """Two processes; see expert_parallel.py."""
    worker = Path(__file__).with_name("expert_parallel.py")
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


@pytest.mark.parametrize(
    "name", sorted({"MixtralExperts", "GptOssExperts", "DeepseekV4Experts"} & CLASSES.keys())
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_dtype_of_the_tokens(name: str, dtype: torch.dtype) -> None:
    experts: Any = tiny.experts_of(CLASSES[name], name)
    hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    inputs = torch.randn(9, hidden), *choices(9, 4)
    with torch.autocast("cpu", dtype):
        got, want = switch.experts_forward(experts, *inputs), eager(experts, *inputs)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.detach().abs().max()))


@pytest.mark.parametrize("name", sorted({"MixtralExperts", "DeepseekV4Experts"} & CLASSES.keys()))
def test_tokens_in_fp32_beside_weights_in_bf16(name: str) -> None:
    """As `grouped_mm` takes them, where a model's norms stay in fp32."""
    experts: Any = tiny.experts_of(CLASSES[name], name)
    x_TH, choice = torch.randn(9, experts.down_proj.shape[1]), choices(9, 4)
    with torch.no_grad():
        want = eager(experts, x_TH, *choice)
        got = switch.experts_forward(experts.to(torch.bfloat16), x_TH, *choice)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2 * float(want.abs().max()))


def test_checkpointing_again_copies_files_and_back_to_eager(tmp_path: Path) -> None:
    """Reentrant checkpointing of frozen experts, a deep copy, a saved model, and eager again."""
    model, ids = qwen3(), torch.randint(64, (2, 9))
    model.set_experts_implementation("eager")
    want = model(ids).logits
    switch.use(model)
    ours = model(ids).logits
    assert torch.equal(copy.deepcopy(model)(ids).logits, ours)
    with torch.inference_mode():
        close(model(ids).logits, ours)
    model.save_pretrained(tmp_path)
    assert "tokenyard" not in (tmp_path / "config.json").read_text()
    loaded = switch.use(AutoModelForCausalLM.from_pretrained(tmp_path))
    close(loaded(ids).logits, ours)
    model.set_experts_implementation("eager")
    assert torch.equal(model(ids).logits, want)

    switch.use(model).train()
    frozen = {name for name, _ in model.named_parameters() if "experts" in name}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    gradients = []
    for reentrant in (None, True):
        if reentrant:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if name not in frozen}
        )
        assert all(model.get_parameter(name).grad is None for name in frozen)
    assert all(torch.equal(first, gradients[1][name]) for name, first in gradients[0].items())


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"cache_implementation": "static"}, {}], ids=str
)
def test_generate_with_left_padding(options: dict[str, Any]) -> None:
    model, ids = qwen3(), torch.randint(3, 64, (3, 7))
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, :1] = 0, 0
    call = partial(
        model.generate, ids * mask, attention_mask=mask, max_new_tokens=6, do_sample=False,
        pad_token_id=0, eos_token_id=1, **options,
    )  # fmt: skip
    model.set_experts_implementation("eager")
    want = call()
    switch.use(model)
    assert torch.equal(call(), want)


def test_low_rank_additions_of_peft() -> None:
    """By `target_parameters`: gradients, then merged, unmerged and unloaded."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=targets)
    base, ids = qwen3(), torch.randint(64, (2, 9))
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.2)

    def run() -> list[Tensor]:
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        trained = [p.grad for p in model.parameters() if p.requires_grad]
        logits = [out.logits]
        model.merge_adapter()
        logits.append(model(input_ids=ids).logits)
        model.unmerge_adapter()
        logits.append(model(input_ids=ids).logits)
        with model.disable_adapter():
            logits.append(model(input_ids=ids).logits)
        return logits + trained

    base.set_experts_implementation("eager")
    want = run()
    switch.use(base)
    got = run()
    assert len(got) == 4 + 2 * 2 * 2 and not torch.equal(got[0], got[3])
    for ours, theirs in zip(got, want):
        close(ours, theirs)
    close(model.merge_and_unload()(ids).logits, want[0])


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(tokenyard.ArgumentError, match="`model`: expected a model with experts"):
        switch.use(nn.Linear(2, 2))
