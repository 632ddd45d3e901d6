"""`nn.MoE` with its experts on several ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from tokenyard import check
from tokenyard.nn.experts import Experts
from tokenyard.nn.moe import Dispatched, MoE
from tokenyard.ops.unpermute import RankTree, Reduction
from tokenyard.parallel.dispatch import combine, dispatch_routed
from tokenyard.parallel.groups import experts_per_rank, process_group
from tokenyard.parallel.transports import AllToAll, Transport, check_transport
from tokenyard.routing import Routing

_NAME = "parallel.ExpertParallel"


class ExpertParallel(ParallelStyle):
    """Spread the experts of an `nn.MoE` over the ranks of a mesh, tokens travelling to them and back:

        parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})

    transport   `AllToAll()` (the default) or `Capacity(rows)`
    reduction   the order of the sum over a token's experts; default that of `nn.Experts`, with a
                deduplicating transport `RankTree(W)` for W ranks
    overlap     compute the shared expert on a CUDA stream beside the exchange

    Parameters of the experts become DTensors, sharded by expert as `torch.chunk` does, so that a state
    dict, `torch.distributed.checkpoint` and FSDP2 know the whole. Every rank has tokens of its own.
    The gradient of an expert is the sum over the tokens of all ranks of the mesh; those of all other
    parameters are over this rank's tokens, and the caller adds them up, or averages them, as in data
    parallelism. Where FSDP2 averages, `moe.experts.set_gradient_divide_factor(ranks with tokens)` makes
    both the gradient of the mean loss. Statistics are of this rank's tokens. Raises ArgumentError.
    """

    def __init__(
        self,
        *,
        transport: Transport | None = None,
        reduction: Reduction | None = None,
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.transport = transport or AllToAll()
        check_transport(_NAME, self.transport)
        self.reduction, self.overlap = reduction, overlap

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MoE):
            check.fail(_NAME, "module", "a tokenyard.nn.MoE", type(module).__name__)
        group = process_group(_NAME, device_mesh)
        experts_per_rank(_NAME, module.gate.num_experts, group.size())
        for name, parameter in list(module.experts.named_parameters(recurse=False)):
            sharded = distribute_tensor(
                parameter.detach(), device_mesh, [Shard(0)], src_data_rank=self.src_data_rank
            )
            setattr(module.experts, name, nn.Parameter(sharded, parameter.requires_grad))
        module.dispatcher = _Exchange(group, self.transport, self.reduction, self.overlap)
        return module


class _Exchange:
    """The `Dispatcher` of `ExpertParallel`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        transport: Transport,
        reduction: Reduction | None,
        overlap: bool,
    ) -> None:
        self.group, self.transport = group, transport
        self.reduction, self.overlap = reduction, overlap

    def __call__(
        self,
        experts: Experts,
        x: Tensor,
        routing: Routing,
        topk_weights: Tensor,
        shared: Callable[[Tensor], Tensor | None],
    ) -> Dispatched:
        meanwhile = _beside if self.overlap and x.is_cuda else _before
        join = meanwhile(shared, x)
        reduction = self.reduction or experts.reduction
        once = self.transport.deduplicate
        if once and not isinstance(reduction, RankTree):
            reduction = RankTree(self.group.size())
        later = not once and experts.weights_on == "output"
        sent = dispatch_routed(
            _NAME,
            x,
            routing,
            topk_weights,
            self.group,
            self.transport,
            "later" if later else "expert",
        )
        out = experts(
            sent.x,
            sent.routing,
            sent.topk_weights,
            weights_on="later" if later else None,
            reduction=_partial(reduction) if once else "slot",
        )
        total = combine(out, sent, reduction=reduction)
        return Dispatched(total, join(), sent.tokens_per_expert, sent.num_dropped)


def _partial(reduction: Reduction) -> RankTree:
    """Of a rank's own experts."""
    within = reduction.within_rank if isinstance(reduction, RankTree) else "fp32"
    return RankTree(1, within, "none")


Join = Callable[[], Tensor | None]


def _before(function: Callable[[Tensor], Tensor | None], x: Tensor) -> Join:
    result = function(x)
    return lambda: result


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _beside(function: Callable[[Tensor], Tensor | None], x: Tensor) -> Join:
    """Call on another stream, on which autograd then also runs the backward."""
    main = torch.cuda.current_stream(x.device)
    if x.device not in _streams:
        _streams[x.device] = torch.cuda.Stream(x.device)
    side = _streams[x.device]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result = function(x)
    x.record_stream(side)

    def join() -> Tensor | None:
        main.wait_stream(side)
        if result is not None:
            result.record_stream(main)
        return result

    return join
