"""Expert parallelism of transformers (where it has `transformers.distributed.expert_parallel`) by Tokenyard.

`DistributedConfig(ep_implementation="tokenyard")`, after `tokenyard.integrations.transformers.register()`.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from tokenyard.parallel import combine, dispatch


class TokenyardEP(EPImplementation):  # type: ignore[misc]
    """Each choice to the rank of its expert and back, by `tokenyard.parallel`; weighed on the token's rank.

    Ranks that share a batch (tensor parallelism) take a slice of it each, and gather the slices afterwards.
    One read of the counts on the host a layer.
    """

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        shape = hidden_states.shape
        shared = self.tp_mesh.size() > 1
        if shared:
            hidden_states, top_k_index, top_k_weights = (
                DTensor.from_local(value, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for value in (hidden_states, top_k_index, top_k_weights)
            )
        sent = dispatch(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.ep_mesh.get_group(),
            num_global_experts=self.num_local_experts * self.ep_mesh.size(),
        )
        ids = sent.routing.topk_indices.long()
        ids = torch.where(ids < 0, self.num_local_experts, ids)
        out = combine(self.experts_forward(sent.x, ids, sent.topk_weights), sent)
        if not shared:
            return out
        whole = DTensor.from_local(
            out.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)
        )
        return whole.full_tensor()


def register(name: str) -> None:
    EPImplementationInterface.register(name, TokenyardEP)
