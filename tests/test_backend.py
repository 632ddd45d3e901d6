"""The choice of an implementation: what is chosen, when, and how it is explained."""

import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import tokenyard
from tokenyard import ArgumentError, backend, explain, use

CPU = torch.zeros(1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that stands for the kernels of an operator called "pretend"."""
    module = ModuleType("tokenyard.kernels.pretend")
    monkeypatch.setitem(sys.modules, "tokenyard.kernels", ModuleType("tokenyard.kernels"))
    monkeypatch.setitem(sys.modules, "tokenyard.kernels.pretend", module)
    monkeypatch.setattr(backend, "KERNELS", {"pretend": "pretend"})
    monkeypatch.setattr(backend, "_triton_installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend._kernels.cache_clear()
    yield module
    backend._kernels.cache_clear()


def test_auto_takes_the_definition_on_a_cpu(kernel: ModuleType) -> None:
    assert backend.kernels("pretend", CPU) is None
    assert explain("pretend", CPU) == "pretend: definition (definitions serve cpu)"


def test_triton_takes_the_kernel_in_the_interpreter(kernel: ModuleType) -> None:
    with use("triton"):
        assert backend.kernels("pretend", CPU) is kernel
        assert explain("pretend") == "pretend: Triton kernel (cpu tensors)"


def test_reference_never_takes_the_kernel(kernel: ModuleType) -> None:
    with use("reference"):
        assert backend.kernels("pretend", CPU) is None
        assert '"reference" is in use' in explain("pretend")


def test_triton_says_why_it_cannot_run(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with use("triton"):
        with pytest.raises(RuntimeError, match=r"tokenyard\.missing.*no Triton kernel"):
            backend.kernels("missing", CPU)
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        backend._kernels.cache_clear()
        with pytest.raises(RuntimeError, match="do not run on cpu"):
            backend.kernels("pretend", CPU)
        monkeypatch.setattr(backend, "_triton_installed", lambda: False)
        backend._kernels.cache_clear()
        with pytest.raises(RuntimeError, match="not installed"):
            backend.kernels("pretend", CPU)


def test_use_restores_the_previous_choice() -> None:
    with use("reference"):
        with use("triton"):
            assert backend._backend == "triton"
        assert backend._backend == "reference"
        with pytest.raises(KeyError), use("auto"):
            raise KeyError
        assert backend._backend == "reference"
    assert backend._backend == "auto"


def test_use_takes_effect_as_a_plain_call_and_in_other_threads() -> None:
    previous = use("reference")
    try:
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(explain("permute")))
        thread.start()
        thread.join()
        assert seen == ['permute: definition (backend "reference" is in use)']
    finally:
        previous.__exit__(None, None, None)
    assert backend._backend == "auto"


def test_an_unknown_backend_changes_nothing() -> None:
    with pytest.raises(ArgumentError, match=r"tokenyard\.use: `backend`: expected one of 'auto'"):
        use("cuda")
    assert backend._backend == "auto"


def test_operators_follow_the_choice() -> None:
    """Both directions: the backward asks again."""
    routing = tokenyard.route(torch.tensor([[0], [1]]), 2)
    x_TH = torch.randn(2, 3, requires_grad=True)
    with use("reference"):
        rows_RH = tokenyard.permute(x_TH, routing)
        rows_RH.sum().backward()
    assert x_TH.grad is not None and torch.equal(x_TH.grad, torch.ones(2, 3))


def test_use_works_again() -> None:
    again = use("reference")
    for _ in range(2):
        with again:
            assert backend._backend == "reference"
            with again:
                assert backend._backend == "reference"
        assert backend._backend == "auto"
    with use("triton"):
        with again:
            assert backend._backend == "reference"
        assert backend._backend == "triton"


def test_explain_knows_every_operator_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    others = {"ArgumentError", "LoRA", "RankTree", "Routing", "conventions", "explain", "nn", "use"}
    definitions = {f"{name}_reference" for name in backend.KERNELS}
    operators = {*tokenyard.__all__} - others - definitions
    assert operators | {"conventions.from_routing_map"} == {*backend.KERNELS}
    for operator, module in backend.KERNELS.items():
        reason = "it has no Triton kernel" if module is None else "definitions serve cpu"
        assert explain(operator, CPU) == f"{operator}: definition ({reason})"
    for unknown in ("nonsense", "routing", "route_mask"):
        message = rf"tokenyard\.explain: `operator`: expected one of .*, got '{unknown}'"
        with pytest.raises(ArgumentError, match=message):
            explain(unknown)


def test_the_error_of_an_operator_names_it() -> None:
    x, routing = torch.zeros(2, 4), tokenyard.route(torch.tensor([[0], [1]]), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_triton_installed", lambda: False)
        backend._kernels.cache_clear()
        for name, call in (
            ("route", lambda: tokenyard.route(torch.tensor([[0], [1]]), 2)),
            ("activation", lambda: tokenyard.activation(x)),
            ("permute_slots", lambda: tokenyard.permute_slots(x[:, :1], routing)),
            (
                r"conventions\.from_routing_map",
                lambda: tokenyard.conventions.from_routing_map(x.bool()),
            ),
        ):
            with (
                use("triton"),
                pytest.raises(RuntimeError, match=rf"^tokenyard\.{name}: .* not inst"),
            ):
                call()
    backend._kernels.cache_clear()


def test_fp64_takes_the_definition_whatever_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend._kernels.cache_clear()
    with use("triton"):
        for operator in backend.WITHOUT_FP64:
            assert backend.kernels(operator, CPU.double()) is None
            assert "definition (its kernels do not" in explain(operator, CPU.double())
            assert "Triton kernel" in explain(operator, CPU)
    backend._kernels.cache_clear()


def test_a_kernel_that_is_listed_exists() -> None:
    """Each module of KERNELS is a file; importing it needs Triton."""
    folder = backend.__file__.replace("backend.py", "kernels")
    for name in filter(None, backend.KERNELS.values()):
        with open(f"{folder}/{name}.py", encoding="utf-8"):
            pass


def test_explain_names_the_tile_of_a_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    backend._kernels.cache_clear()
    rows, weight = torch.zeros(4096, 64), torch.zeros(4, 32, 64)
    with use("triton"):
        assert "64 x 64 x 16 by pointers, 8 warps, 3 stages; table of" in explain(
            "grouped_gemm", rows, weight
        )
        half = explain("grouped_gemm", rows.half(), weight.mT.half())
        assert "128 x 256 x 64 by descriptors" in half
        assert "16 x 64 x 128" in explain("grouped_gemm", rows[:8].half(), weight.half())
        assert ";" not in explain("grouped_gemm", rows.double(), weight.double())
    assert explain("grouped_gemm", rows, weight).endswith("(definitions serve cpu)")
    backend._kernels.cache_clear()
