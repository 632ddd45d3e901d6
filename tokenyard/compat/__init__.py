"""Drop-in modules, one per library: same names, same arguments, same results, one import line to change.

`transformer_engine`, `d9d`, `megatron`, `xtuner`, `grouped_gemm`, `moe_ops`, `scattermoe`. Each function is a
few lines over `Routing`, `conventions` and the operators, so it runs on any device, is differentiable,
and adds up as the operators do: in fp32, in a stated order. Where the other library's behaviour is a
fault (a write out of bounds, uninitialised memory), the docstring states the defined result given here.
"""
