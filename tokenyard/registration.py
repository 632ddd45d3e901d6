"""How an operator is registered: one implementation, reached in two ways.

Eager calls go through a `torch.autograd.Function` (14 to 20 us of host time), compiled and exported ones,
and tensor subclasses such as fake tensors, through the custom op `tokenyard::<name>`.
Not supported: batched gradients (`is_grads_batched`), `torch.func.grad` and `vmap`, double backward.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


class Operator:
    """A forward of tensors and plain values, with an optional backward, callable with grad.

    forward(*args)                      the implementation, typed so that a schema can be read off it
    fake(*args)                         shapes and dtypes of what it returns
    save(ctx, inputs, output)           keeps what the gradient needs
    gradient(ctx, backward, *grads)     one gradient per input, from `backward` and what was saved
    backward, backward_fake             as forward and fake, registered as `tokenyard::<name>_backward`
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        save: Callable[..., None] | None = None,
        gradient: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
        backward_fake: Callable[..., Any] | None = None,
    ) -> None:
        forward = _without_autocast(forward)
        self.forward = forward
        self.registered = torch.library.custom_op(f"tokenyard::{name}", forward, mutates_args=())
        self.registered.register_fake(fake)
        self.function: type[torch.autograd.Function] | None = None
        if gradient is None or save is None or backward is None or backward_fake is None:
            return
        backward = _without_autocast(backward)
        registered_backward = torch.library.custom_op(
            f"tokenyard::{name}_backward", backward, mutates_args=()
        )
        registered_backward.register_fake(backward_fake)
        self.registered.register_autograd(
            lambda ctx, *grads: gradient(ctx, registered_backward, *grads), setup_context=save
        )
        self.function = _function(name, forward, save, gradient, backward, registered_backward)
        # without the look at every argument for functorch, which costs 3 to 10 us a call
        self.apply = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.registered(*args)
        needs_grad = False
        for arg in args:
            if isinstance(arg, Tensor):
                if type(arg) not in _PLAIN or arg.is_meta:
                    return self.registered(*args)
                needs_grad = needs_grad or arg.requires_grad
        if needs_grad and self.function is not None and torch.is_grad_enabled():
            if torch._C._are_functorch_transforms_active():
                return self.function.apply(*args)
            return self.apply(*args)
        return self.forward(*args)


def _without_autocast(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Public functions cast for autocast; what is inside computes in the dtypes that it states."""

    @functools.wraps(implementation)
    def call(first: Tensor, *args: Any) -> Any:
        device = first.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return implementation(first, *args)
        return implementation(first, *args)

    return call


def _function(
    name: str,
    forward: Callable[..., Any],
    save: Callable[..., None],
    gradient: Callable[..., Any],
    backward: Callable[..., Any],
    registered_backward: Callable[..., Any],
) -> type[torch.autograd.Function]:
    """The short way. Forward and save in one: a separate setup_context costs 15 us a call."""

    def forward_and_save(ctx: Any, *args: Any) -> Any:
        output = forward(*args)
        save(ctx, args, output)
        return output

    def call_gradient(ctx: Any, *grads: Any) -> Any:
        # under create_graph the registered op, whose gradient torch refuses: never a wrong one
        return gradient(ctx, registered_backward if torch.is_grad_enabled() else backward, *grads)

    methods = {"forward": forward_and_save, "backward": call_gradient}
    static = {key: staticmethod(method) for key, method in methods.items()}
    return type(name, (torch.autograd.Function,), static)
