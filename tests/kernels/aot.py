"""Compile every kernel for a GPU that need not exist.

Launchers run on CPU tensors while `captured_launches` takes their launches instead of a GPU; each
launch is then compiled for a target as the JIT would specialise it. Needs TRITON_INTERPRET unset, so
the tests run this file as a program of its own: `python aot.py TARGET` prints a JSON line a kernel.
A new family of kernels joins FAMILIES with a function that calls its launchers.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, native_specialize_impl

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SHARED_LIMIT = {
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments by name, and its options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]


@contextlib.contextmanager
def captured_launches() -> Iterator[list[Launch]]:
    """Collect launches in place of running them."""
    launches: list[Launch] = []

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = dict(zip(kernel.arg_names, args)) | kwargs
        launches.append(Launch(kernel, arguments, options))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def source_of(launch: Launch, target: str) -> ASTSource:
    """Specialise as the JIT does for this target, so that what is compiled is what would run."""
    backend = make_backend(TARGETS[target])
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind, key = "constexpr", None
        if not parameter.is_constexpr:
            kind, key = native_specialize_impl(
                backend,
                value,
                parameter.is_const,
                not parameter.do_not_specialize,
                not parameter.do_not_specialize_on_alignment,
            )
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif key:
            attributes[(index,)] = backend.parse_attr(key)
    source = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    return source(launch.kernel, signature, constants, attributes)


def compile_source(source: ASTSource, options: dict[str, Any], target: str) -> dict[str, Any]:
    """Compile, and report the resources and the instructions that matter."""
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    report = {
        "kernel": source.fn.__name__,
        "constants": {source.fn.arg_names[i]: str(v) for (i,), v in source.constants.items()},
        "options": options,
        "shared": compiled.metadata.shared,
    }
    if isinstance(source, GluonASTSource):
        report["serialized"] = _serialized(compiled.asm["ptx"])
    if "cubin" in compiled.asm:
        return report | _nvidia_report(compiled.asm["ptx"], compiled.asm["cubin"])
    return report | _amd_report(compiled.asm["amdgcn"])


def _serialized(ptx: str) -> list[str]:
    """What ptxas says of MMAs that it does not leave asynchronous."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, check=True, text=True).stderr
    return [line for line in said.splitlines() if "C75" in line]


def _nvidia_report(ptx: str, cubin: bytes) -> dict[str, Any]:
    """Stack and local memory count as spills: no kernel here asks for either."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, flag, file.name], capture_output=True, check=True, text=True)
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    used = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    if not re.search(r"\bEXIT\b", sass.stdout):
        raise RuntimeError(f"cuobjdump shows no machine code: {sass.stderr}")
    copies = _counts(r"\bcp\.async\.c[ag]\.\S+ [^;]*?\], (0x[0-9a-f]+)", ptx)
    return {
        "registers": used["REG"],
        "spills": used["STACK"] + used["LOCAL"],
        "loads": _counts(r"\bld\.global\S*?((?:\.v\d)?\.b\d+)", ptx)
        | {f"async {int(size, 16)}": n for size, n in copies.items()},
        "stores": _counts(r"\bst\.global\S*?((?:\.v\d)?\.b\d+)", ptx),
        "fused": len(re.findall(r"\b[FD]FMA2?\b", sass.stdout)),
    }


def _amd_report(amdgcn: str) -> dict[str, Any]:
    """Scalar registers spill to lanes of vector registers, not to memory, and are not counted."""
    (registers,) = re.findall(r"\.vgpr_count:\s*(\d+)", amdgcn)
    spills = re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", amdgcn)
    return {
        "registers": int(registers),
        "spills": sum(int(count) for count in spills),
        "loads": _counts(r"\b(?:buffer|global)_load_(\w+)", amdgcn),
        "stores": _counts(r"\b(?:buffer|global)_store_(\w+)", amdgcn),
        "fused": len(re.findall(r"\bv_(?:pk_)?fma", amdgcn)),
    }


def _counts(pattern: str, text: str) -> dict[str, int]:
    return dict(Counter(re.findall(pattern, text)))


ORDERS = (
    ("slot", 0, "fp32", "fp32"),
    ("expert", 0, "fp32", "fp32"),
    ("expert", 4, "fp32", "fp32"),
    ("expert", 4, "fp64", "fp64"),
    ("slot", 4, "fma_bf16", "fp32"),
)


def permutation_family(target: str) -> None:
    """Every kernel of the permutation family: a wide model, narrow rows, and many choices."""
    from tokenyard.kernels import permute, routing, routing_mask, sort_chunks, topk, unpermute

    bf16, int32 = torch.bfloat16, torch.int32
    for num_tokens, top_k, num_experts, width in ((8192, 8, 256, 7168), (64, 2, 8, 64)):
        ids = torch.zeros(num_tokens, top_k, dtype=int32)
        rows = num_tokens * top_k
        slots = torch.zeros(rows, dtype=int32)
        x, y = torch.empty(num_tokens, width, dtype=bf16), torch.empty(rows, width, dtype=bf16)
        weights = torch.empty(num_tokens, top_k)
        logits = torch.empty(num_tokens, num_experts)
        routing.route(ids.long(), num_experts, 1, rows, None)
        mask = torch.zeros(num_experts, num_tokens, dtype=torch.bool).t()
        routing_mask.route_mask(mask, top_k, 1, rows)
        routing_mask.route_mask(mask.contiguous(), top_k, 1, rows)
        permute.permute(x, ids, slots)
        permute.gather_values(weights.flatten(), slots)
        for order, ep_size, within, across in ORDERS:
            unpermute.combine(y, weights, ids, ids, num_experts, order, ep_size, within, across)
        unpermute.sum_rows(y, ids)
        unpermute.unpermute_backward(x, y, weights, ids, slots)
        chunks = torch.zeros(num_experts, dtype=int32)
        sort_chunks.sort_chunks(y, chunks, chunks)
        bias = torch.zeros(num_experts)
        for score, groups in (("softmax", 1), ("sigmoid", 8)):
            selection = bias if groups > 1 else None
            topk.topk(
                logits, None, top_k, score, 0.0, selection, groups, max(groups // 2, 1),
                "sum_of_top2", "sum", 1.0, 1e-20, "add", 2.5,
            )  # fmt: skip
            topk.topk_backward(weights, logits, ids, score, 0.0, "sum", 1.0, 1e-20, "add", 2.5)

    routing.route(torch.zeros(8192, 2, dtype=int32), 8, 1, 16384, None)
    routing.route(torch.zeros(64, 8, dtype=int32), 256, 16, 4096, None)
    # more choices than one step of the slot loop looks at
    ids, slots = torch.zeros(64, 40, dtype=int32), torch.zeros(64 * 40, dtype=int32)
    x, y = torch.empty(64, 2880), torch.empty(64 * 40, 2880)
    permute.permute(x, ids, slots)
    unpermute.combine(y, torch.empty(64, 40), ids, ids, 48, "slot", 0, "fp32", "fp32")
    unpermute.unpermute_backward(x, y, torch.empty(64, 40), ids, slots)


def gemm_family(target: str) -> None:
    """The GEMMs with every tile of the target's table: few rows to many, both layouts, unaligned sizes."""
    from tokenyard.kernels import grouped_gemm

    grouped_gemm.architecture = lambda device: target
    num_experts = 8
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    groups = offsets, offsets[1:]
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, size_in, size_out in ((bf16, 2048, 1536), (bf16, 2044, 1530), (fp32, 2048, 1536)):
        weight = torch.empty(num_experts, size_out, size_in, dtype=dtype)
        bias = torch.empty(num_experts, size_out, dtype=dtype)
        for rows_per_expert in (8, 24, 48, 256):
            x = torch.empty(rows_per_expert * num_experts, size_in, dtype=dtype)
            grouped_gemm.grouped_gemm(x, weight, None, *groups, "ENK")
            if dtype == bf16 and rows_per_expert in (8, 256):
                grouped_gemm.grouped_gemm(x, weight, bias, *groups, "ENK")
                grouped_gemm.grouped_gemm(x, weight.view(8, size_in, -1), None, *groups, "EKN")
        grad = torch.empty(x.shape[0], size_out, dtype=dtype)
        grouped_gemm.grouped_gemm_backward(grad, x, weight, *groups, "ENK", True, True, True)
        main_grad = torch.empty(weight.shape)
        grouped_gemm.weight_gradient(grad, x, *groups, main_grad, True)


def activation_family(target: str) -> None:
    """The activation by itself."""
    from tokenyard.kernels import activation

    z = torch.empty(512, 4096, dtype=torch.bfloat16)
    for kind, layout in (
        ("swiglu", "concatenated"),
        ("geglu_tanh", "interleaved"),
        ("clamped_swiglu", "interleaved"),
        ("gelu", "concatenated"),
    ):
        d_a = activation.activation(z, kind, layout)
        activation.activation_backward(d_a, z, kind, layout)


def expert_family(target: str) -> None:
    """The experts' kernels, with every tile of the target's table."""
    from tokenyard.kernels import expert_mlp

    expert_mlp.architecture = lambda device: target
    num_experts, hidden, inner, top_k = 8, 2048, 768, 8
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    groups = offsets, offsets[1:]
    for dtype in (torch.bfloat16, torch.float32):
        w1 = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype)
        for rows_per_expert in (8, 24, 48, 256):
            num_rows = rows_per_expert * num_experts
            x, slots = torch.empty(num_rows, hidden, dtype=dtype), torch.zeros(num_rows).int()
            tokens = x[: num_rows // top_k]
            way = "swiglu", "concatenated"
            expert_mlp.up(tokens, slots, top_k, w1, None, *groups, True, *way, num_rows, True)
        z, weights = torch.empty(num_rows, 2 * inner, dtype=dtype), torch.empty(len(tokens), top_k)
        d_a = torch.empty(num_rows, inner, dtype=dtype)
        _, dots = expert_mlp.activation_gradient(d_a, z, weights, slots, *way)
        ids, bias = slots.view(-1, top_k), torch.empty(num_experts, hidden, dtype=dtype)
        expert_mlp.weights_gradient(dots, ids, tokens, bias, ids, dtype)
        if dtype == torch.bfloat16:
            way = "clamped_swiglu", "interleaved"
            expert_mlp.up(x, None, top_k, w1, None, *groups, True, *way, num_rows, True)
            expert_mlp.activation_gradient(d_a, z, weights, slots, *way)


def hopper_family(target: str) -> None:
    """The kernels in Gluon, for sm_90 alone."""
    if target != "sm_90":
        return
    from tokenyard.kernels import hopper_gemm

    num_experts, num_rows, hidden, inner = 8, 2048, 2048, 768
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    groups = offsets, offsets[1:]
    bf16 = torch.bfloat16
    x, a = (torch.empty(num_rows, size, dtype=bf16) for size in (hidden, inner))
    z, bias = (torch.empty(rows, 2 * inner, dtype=bf16) for rows in (num_rows, num_experts))
    w1 = torch.empty(num_experts, 2 * inner, hidden, dtype=bf16)
    hopper_gemm.multiply(x, w1, None, *groups, True, z)
    hopper_gemm.multiply(x, w1.view(num_experts, hidden, -1), bias, *groups, False, z)
    for kind, out in (("clamped_swiglu", a), ("gelu", z)):
        hopper_gemm.up(x, w1, bias, *groups, True, torch.empty_like(z), out, kind)
    hopper_gemm.up(x, w1, None, *groups, True, None, a, "swiglu")
    hopper_gemm.weight_gradient(z, x, *groups, w1)
    many = torch.empty(4 * num_rows, hidden, dtype=bf16)
    square = torch.empty(num_experts, hidden, hidden, dtype=bf16)
    hopper_gemm.weight_gradient(many, many, *groups, square)


FAMILIES: dict[str, Callable[[str], None]] = {
    "permutation": permutation_family,
    "gemm": gemm_family,
    "activation": activation_family,
    "experts": expert_family,
    "hopper": hopper_family,
}


def main(target: str) -> None:
    for name, family in FAMILIES.items():
        with captured_launches() as launches:
            family(target)
        seen = set()
        for launch in launches:
            source = source_of(launch, target)
            key = (source.hash(), str(launch.options))
            if key not in seen:
                seen.add(key)
                report = compile_source(source, launch.options, target)
                print(json.dumps({"family": name} | report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
