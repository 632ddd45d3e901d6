"""`tokenyard.topk` against formulas of public models written out here, and at its edges."""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tokenyard import ArgumentError, nn, topk, topk_reference

INF, NAN = float("inf"), float("nan")
SCORES = ("softmax", "softmax_of_selected", "sigmoid", "sqrtsoftplus", "identity")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DOC = (Path(__file__).parents[2] / "docs" / "routers.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|`]+?) \| (\d+) \| `(topk\(.+?\))` \| (?:`(.+?)`)? ?\|", re.MULTILINE)
TABLE = {model: (int(experts), call, extra) for model, experts, call, extra in ROW.findall(DOC)}
Chosen = tuple[Tensor, Tensor]
Formula = Callable[[Tensor, Namespace], Chosen]


def total(w_TK: Tensor) -> Tensor:
    return w_TK.sum(1, keepdim=True)


def weigh(s_TE: Tensor, ids_TK: Tensor, norm: Any = torch.ones_like, scale: Any = 1.0) -> Chosen:
    w_TK = s_TE.gather(1, ids_TK)
    return w_TK / norm(w_TK) * (scale[ids_TK] if isinstance(scale, Tensor) else scale), ids_TK


def best(c_TE: Tensor, top_k: int) -> Tensor:
    return c_TE.topk(top_k, dim=1).indices


def kept_groups(c_TE: Tensor, groups: int, kept: int, count: int) -> Tensor:
    """-inf outside the `kept` groups whose `count` greatest values sum highest."""
    score_TG = c_TE.unflatten(1, (groups, -1)).sort(dim=2).values[:, :, -count:].sum(2)
    out_TG = torch.ones_like(score_TG).scatter(1, best(score_TG, kept), 0) > 0
    return c_TE.masked_fill(out_TG.repeat_interleave(c_TE.shape[1] // groups, dim=1), -INF)


def softmax(
    top_k: int, norm: Any = torch.ones_like, scale: float = 1, biased: bool = False, kept: int = 0
) -> Formula:
    def formula(z: Tensor, a: Namespace) -> Chosen:
        c_TE = z.softmax(1) + a.b * biased
        ids_TK = best(kept_groups(c_TE, 8, kept, 1) if kept else c_TE, top_k)
        return weigh(z.softmax(1), ids_TK, norm, scale)

    return formula


def softmax_after(top_k: int) -> Formula:
    return lambda z, a: (z.topk(top_k).values.softmax(1), best(z, top_k))


def deepseek_v3(top_k: int, scale: float, groups: int = 1, kept: int = 1) -> Formula:
    def formula(z: Tensor, a: Namespace) -> Chosen:
        s_TE = 1 / (1 + torch.exp(-z))
        ids_TK = best(kept_groups(s_TE + a.b, groups, kept, 2), top_k)
        return weigh(s_TE, ids_TK, lambda w: total(w) + 1e-20, scale)

    return formula


def deepseek_v4(z: Tensor, a: Namespace, ids_TK: Tensor | None = None) -> Chosen:
    s_TE = torch.log1p(torch.exp(z)).sqrt()
    ids_TK = best(s_TE + a.b, 6) if ids_TK is None else ids_TK
    return weigh(s_TE, ids_TK, lambda w: total(w) + 1e-20, 1.5)


FORMULAS: dict[str, Formula] = {
    "Mixtral": softmax(2, total),
    "Qwen2-MoE": softmax(4),
    "Qwen3-MoE": softmax(8, total),
    "Qwen3-Next": softmax(10, total),
    "OLMoE": softmax(8),
    "DeepSeek-V2": softmax(6, scale=16, kept=3),
    "DeepSeek-V2-Lite": softmax(6),
    "DeepSeek-V3": deepseek_v3(8, 2.5, groups=8, kept=4),
    "Kimi-K2": deepseek_v3(8, 2.827),
    "GLM-4.5": deepseek_v3(8, 2.5),
    "dots1": deepseek_v3(6, 2.5),
    "Ling": deepseek_v3(8, 2.5, groups=8, kept=4),
    "DeepSeek-V4": deepseek_v4,
    "DeepSeek-V4, hash layers": lambda z, a: deepseek_v4(z, a, a.ids),
    "gpt-oss": lambda z, a: softmax_after(4)(z + a.c, a),
    "Granite": softmax_after(8),
    "JetMoE": softmax_after(2),
    "Aria": softmax_after(6),
    "Llama 4": lambda z, a: weigh(z.sigmoid(), z.argmax(1, keepdim=True)),
    "Ernie 4.5": softmax(6, lambda w: total(w).clamp(min=1e-12), biased=True),
    "Hunyuan": softmax(8, total),
    "MiniMax-M2": lambda z, a: weigh(z.sigmoid(), best(z.sigmoid() + a.b, 8), total),
    "LongCat-Flash": softmax(12, scale=6.0, biased=True),
    "Gemma 4": lambda z, a: weigh(z.softmax(1), best(z, 8), total, a.g),
    "Switch": softmax(1),
    "DBRX": softmax(4, lambda w: torch.linalg.vector_norm(w, ord=1, dim=1, keepdim=True)),
}


def compare(got: Chosen, want: Chosen, leaves: list[Tensor], d_TK: Tensor) -> None:
    """Ids, weights, and the gradients of a random upstream gradient."""
    assert got[1].tolist() == want[1].tolist()
    tight = {"rtol": 1e-10, "atol": 1e-12} if d_TK.dtype == torch.float64 else {}
    torch.testing.assert_close(got[0], want[0], equal_nan=False, **tight)
    loose = tight or {"rtol": 1e-4, "atol": 1e-6}
    grads = [torch.autograd.grad(w, leaves, d_TK, allow_unused=True) for w in (got[0], want[0])]
    for d_got, d_want in zip(*grads):
        assert (d_got is None) == (d_want is None)
        if d_want is not None:
            torch.testing.assert_close(d_got, d_want, **loose)


@pytest.mark.parametrize("model", FORMULAS)
def test_model_of_the_table(model: str) -> None:
    assert list(TABLE) == list(FORMULAS) and DOC.count("`topk(") == len(TABLE)  # all rows are read
    experts, call, extra = TABLE[model]
    for dtype in (torch.float32, torch.float64):
        z_TE = (2 * torch.randn(7, experts, dtype=dtype)).requires_grad_()
        b_E, c_E, g_E = (0.1 * torch.randn(experts, dtype=dtype) for _ in range(3))
        ids_TK = torch.rand(7, experts).topk(6).indices
        a = Namespace(b=b_E, c=c_E.requires_grad_(), g=(1 + g_E).requires_grad_(), ids=ids_TK)
        got = eval(call, {"topk": topk, "z": z_TE, **vars(a)})
        compare(got, FORMULAS[model](z_TE, a), [z_TE, a.c, a.g], torch.randn_like(got[0]))

    top_k, options = eval(call, {"topk": lambda z, k, **o: (k, o), "z": z_TE, **vars(a)})
    options = {name: value for name, value in options.items() if not isinstance(value, Tensor)}
    options |= eval(f"dict({extra})", vars(a)) if extra else {}
    router = nn.Router(5, experts, top_k, **options, dtype=dtype)
    router.load_state_dict({"bias": a.c, "e_score_correction_bias": a.b}, strict=False)
    x_TH = torch.randn(7, 5, dtype=dtype)
    out = router(x_TH, a.ids if "ids" in call else None)
    want = FORMULAS[model](x_TH @ router.weight.T, a)
    compare(out[1:], want, [router.weight], torch.randn_like(want[0]))


@pytest.mark.parametrize("experts", [1, 3, 6, 60, 72, 160, 384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_nan_and_infinities(experts: int, dtype: torch.dtype) -> None:
    values = torch.tensor([-2.0, -1, -1, 0, 1, 2, 2, -INF, NAN, INF], dtype=dtype)
    z_TE = values[torch.randint(10, (6, experts))]
    z_TE[0], z_TE[1], z_TE[2], z_TE[3], z_TE[4, 1:] = 1, NAN, -INF, INF, -INF
    z_TE = z_TE.t().contiguous().t().requires_grad_()
    keys = z_TE.detach().nan_to_num(nan=-INF, posinf=INF, neginf=-INF).tolist()
    order = [sorted(range(experts), key=lambda e: (-key_E[e], e)) for key_E in keys]
    for top_k, score in product(sorted({1, min(22, experts), experts}), SCORES):
        weights_TK, ids_TK = topk(z_TE, top_k, score=score)
        assert ids_TK.tolist() == [ids[:top_k] for ids in order]
        assert weights_TK.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert not weights_TK.isnan().any() and weights_TK.shape == ids_TK.shape == (6, top_k)
        if score != "identity":
            assert weights_TK.isfinite().all()
            assert not weights_TK[1:3].any() and not weights_TK[4, 1:].any()
        (d_z_TE,) = torch.autograd.grad(weights_TK, z_TE, torch.randn_like(weights_TK))
        assert d_z_TE.isfinite().all() and not d_z_TE[~z_TE.isfinite()].any()


@pytest.mark.parametrize(("group_score", "count"), [("max", 1), ("sum_of_top2", 2)])
def test_groups_with_ties_and_infinities(group_score: Any, count: int) -> None:
    z_TE = torch.tensor([-1.0, 0, 1, 2, -INF])[torch.randint(5, (300, 12))]
    options: dict[str, Any] = {"num_groups": 4, "topk_groups": 2, "group_score": group_score}
    _, ids_TK = topk(z_TE, 6, score="identity", **options)
    for z_E, ids_K in zip(z_TE.tolist(), ids_TK.tolist()):
        groups = sorted(range(4), key=lambda j: -sum(sorted(z_E[3 * j : 3 * j + 3])[-count:]))
        kept = [e for e in range(12) if e // 3 in groups[:2]]
        assert ids_K == sorted(kept, key=lambda e: (-z_E[e], e))


def test_choice_is_lossless() -> None:
    """Neighbouring fp32 logits, large ones whose sigmoid is 1, and a bias that dwarfs the scores."""
    for low, score in product((1.0, -3.7, 40.0, 1e-30), SCORES):
        z_TE = torch.full((5, 384), low)
        z_TE[:, 300] = torch.nextafter(torch.tensor(low), torch.tensor(INF))
        assert topk(z_TE, 2, score=score)[1].tolist() == [[300, 0]] * 5
    z_TE = torch.randn(5, 8)
    weights_TK, ids_TK = topk(z_TE, 3, score="sigmoid", selection_bias=1e6 * torch.arange(8.0))
    assert ids_TK.tolist() == [[7, 6, 5]] * 5
    assert torch.equal(weights_TK, z_TE[:, [7, 6, 5]].sigmoid())


@pytest.mark.parametrize("score", SCORES)
def test_given_indices(score: Any) -> None:
    """Replay, none (-1 and E), duplicates; what is absent leaks neither values nor gradients."""
    z_TE, scale_E = torch.randn(4, 5, requires_grad=True), torch.rand(5, requires_grad=True)
    options: dict[str, Any] = {"score": score, "normalize": "sum", "expert_scale": scale_E}
    replayed_TK, _ = topk(z_TE, 3, topk_indices=topk(z_TE, 3, **options)[1], **options)
    assert torch.equal(replayed_TK, topk(z_TE, 3, **options)[0])
    given = torch.tensor([[2, -1, 2], [5, 1, 3], [-1, 5, -1], [3, 2, 1]], dtype=torch.int8)
    present = (given >= 0) & (given < 5)
    ids_TK = given.long().where(present, 0)
    s_TK = {"softmax": lambda: z_TE.softmax(1).gather(1, ids_TK),
            "softmax_of_selected": lambda: z_TE.gather(1, ids_TK).exp(),
            "sigmoid": lambda: z_TE.sigmoid().gather(1, ids_TK),
            "sqrtsoftplus": lambda: z_TE.exp().log1p().sqrt().gather(1, ids_TK),
            "identity": lambda: z_TE.gather(1, ids_TK)}[score]()  # fmt: skip
    s_TK = s_TK.where(present, 0)
    share_TK = s_TK / s_TK.sum(1, keepdim=True).where(present.any(1, keepdim=True), 1)
    want = (share_TK * scale_E[ids_TK], given.where(present, -1))
    compare(topk(z_TE, 3, topk_indices=given, **options), want, [z_TE, scale_E], torch.randn(4, 3))
    scale_E = torch.tensor([NAN, 1, 1, 1, 1])  # of an expert that `given` does not name
    assert topk(z_TE, 3, topk_indices=given, expert_scale=scale_E)[0].isfinite().all()


def test_softcap_and_normalization() -> None:
    for p, eps, mode in product((1, 1.5, 2, 7), (0, 1e-20, 0.3, 1.7, 50), ("add", "clamp")):
        for normalize in ("norm", "sum")[: 1 + (p == 1)]:
            z_TE = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
            s_TK, ids_TK = (2 * torch.tanh(z_TE / 2)).sigmoid().topk(3)
            n_T1 = (s_TK**p).sum(1, keepdim=True) ** (1 / p)
            n_T1 = n_T1 + eps if mode == "add" else n_T1.clamp(min=eps)
            options = {"normalize": normalize, "norm_p": p, "eps": eps, "eps_mode": mode}
            got = topk(z_TE, 3, score="sigmoid", softcap=2.0, **options)
            compare(got, (s_TK / n_T1, ids_TK), [z_TE], torch.randn_like(s_TK))


@pytest.mark.parametrize("function", [topk, topk_reference])
@pytest.mark.parametrize("normalize", ["sum", "norm"])
@pytest.mark.parametrize("score", SCORES)
def test_rows_that_sum_to_zero(score: Any, normalize: Any, function: Any) -> None:
    """They are divided by one, a constant."""
    row_K = (
        [-INF, -INF] if score != "identity" else [1.0, -1.0] if normalize == "sum" else [0.0, 0.0]
    )
    z_TE, d_TK = torch.tensor([row_K], requires_grad=True), torch.tensor([[0.3, 1.7]])
    weights_TK, _ = function(z_TE, 2, score=score, normalize=normalize)
    (d_z_TE,) = torch.autograd.grad(weights_TK, z_TE, d_TK)
    assert weights_TK.tolist() == [row_K if score == "identity" else [0, 0]]
    torch.testing.assert_close(d_z_TE, d_TK if score == "identity" else torch.zeros(1, 2))


@pytest.mark.parametrize("score", SCORES)
def test_gradcheck_and_opcheck(score: Any) -> None:
    z_TE = torch.stack([torch.randperm(6) for _ in range(3)]).double() / 3 + 0.2
    leaves = [x.double().requires_grad_() for x in (z_TE, torch.rand(6) / 9, torch.randn(6))]
    for normalize, mode in product(("none", "sum", "norm"), ("add", "clamp")):
        options: dict[str, Any] = {"score": score, "normalize": normalize, "eps_mode": mode}
        options |= {"norm_p": 2.5, "eps": 0.1, "softcap": 3.0}
        for function in (topk, topk_reference):
            f = partial(
                lambda f, o, z, c, g: f(z, 4, logit_bias=c, expert_scale=g, **o)[0], function
            )
            assert torch.autograd.gradcheck(partial(f, options), leaves)
    args = (3, score, 2.0, torch.randn(6), 3, 2, "max", "norm", 2.0, 0.1, "add", 1.5)
    for given in (None, torch.tensor([[0, -1, 6]] * 3)):
        torch.library.opcheck(torch.ops.tokenyard.topk, (leaves[0], given, *args))


def test_compile_does_not_depend_on_the_number_of_tokens() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    options: dict[str, Any] = {"score": "sigmoid", "normalize": "sum", "num_groups": 2}
    compiled = torch.compile(topk, fullgraph=True, backend=counter)
    for tokens in (4, 9, 17):
        z_TE = torch.randn(tokens, 6, requires_grad=True)
        want, d_TK = topk(z_TE, 2, **options), torch.randn(tokens, 2)
        torch._dynamo.mark_dynamic(z_TE, 0)
        compare(compiled(z_TE, 2, **options), want, [z_TE], d_TK)
    assert counter.frame_count == 1


def test_no_tokens_and_dtypes() -> None:
    z_TE = torch.zeros(0, 5, requires_grad=True)
    weights_TK, ids_TK = topk(z_TE, 2, num_groups=5, topk_groups=2, normalize="sum")
    weights_TK.sum().backward()
    assert weights_TK.shape == ids_TK.shape == (0, 2) and z_TE.grad.shape == (0, 5)
    for dtype in DTYPES:
        z_TE = torch.randn(9, 6).to(dtype)
        w_TK, (wide_TK, _) = topk(z_TE, 3)[0], topk(z_TE.double(), 3)
        torch.testing.assert_close(w_TK, wide_TK.to(w_TK.dtype))
        assert torch.equal(topk(z_TE, 3, dtype=dtype)[0], w_TK.to(dtype))


BAD: list[tuple[str, dict[str, Any]]] = [
    ("router_logits", {"router_logits": torch.zeros(3, 6, dtype=torch.int32)}),
    ("router_logits", {"router_logits": [[1.0]]}), ("router_logits.shape[1]", {"num_groups": 4}),
    ("router_logits", {"router_logits": torch.zeros(3)}), ("topk_groups", {"topk_groups": 2}),
    ("top_k", {"top_k": 0}), ("top_k", {"top_k": 7}), ("top_k", {"top_k": 3, "num_groups": 3}),
    ("score", {"score": "relu"}), ("group_score", {"group_score": "mean"}),
    ("normalize", {"normalize": "mean"}), ("norm_p", {"norm_p": 0.5}), ("norm_p", {"norm_p": NAN}),
    ("eps", {"eps": -1.0}), ("eps_mode", {"eps_mode": "max"}), ("softcap", {"softcap": 0.0}),
    ("num_groups", {"num_groups": 0}), ("topk_indices", {"topk_indices": torch.zeros(3, 2)}),
    ("expert_scale", {"expert_scale": torch.ones(5)}), ("dtype", {"dtype": torch.int32}),
    ("logit_bias", {"logit_bias": torch.ones(6, dtype=torch.int64)}),
    ("selection_bias", {"selection_bias": torch.ones(6, device="meta")}),
    ("topk_indices", {"topk_indices": torch.zeros(3, 1, dtype=torch.int64)}),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "change"), BAD)
def test_bad_argument(argument: str, change: dict[str, Any]) -> None:
    for function in (topk, topk_reference):
        with pytest.raises(ArgumentError, match=re.escape(f"tokenyard.topk: `{argument}`")):
            function(**{"router_logits": torch.zeros(3, 6), "top_k": 2, **change})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk_groups": 1.0, "num_groups": 2}, "`topk_groups`: expected an integer, got float"),
        ({"softcap": "x"}, "`softcap`: expected a number, got str 'x'"),
        ({"eps": "x"}, "`eps`: expected a number"),
        ({"scale": None}, "`scale`: expected a number, got NoneType"),
    ],
    ids=str,
)
def test_an_option_of_another_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        topk(torch.randn(2, 4), 2, **options)


def test_a_fractional_k_and_an_unknown_option() -> None:
    with pytest.raises(ArgumentError, match=r"`top_k`: expected an integer, got float 2\.0"):
        topk(torch.randn(2, 4), 2.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"`options`: expected one of .*'eps'.*, got 'foo'"):
        topk_reference(torch.randn(2, 4), 2, foo=1)
