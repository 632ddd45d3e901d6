"""Routing <-> the row maps and group metadata of other libraries: a `to_` / `from_` pair each.

slot = t * K + k, row = position in the expert-sorted buffer. Every docstring shows one example:
T=5 tokens, E=3 experts, K=2 choices. All functions run on the device of their arguments and never
synchronise, but for a count that is wanted on the CPU.

`to_` results may share memory with the record: do not write into them.
`from_` functions take a map of any integer dtype, keep the peer's rows, and want
`expert_offsets` [E+1], rows of expert e being offsets[e] : offsets[e+1] (get them by
`from_group_ends`, `from_group_counts`, `from_padded_bins` or `from_expert_of_row`), and `Layout`.
An entry outside its range has no row and is never written anywhere. A map with a gap inside an
expert's rows, a row named twice, or rows out of slot order gives a record that `validate` rejects.
"""

from tokenyard.conventions.groups import (
    from_expert_of_row,
    from_group_counts,
    from_group_ends,
    from_padded_bins,
    to_expert_of_row,
    to_group_counts,
    to_group_ends,
    to_padded_bins,
)
from tokenyard.conventions.maps import (
    Layout,
    from_inverse_map,
    from_mask_map,
    from_moe_ops_map,
    from_routing_map,
    from_row_id_map,
    from_scatter_indices,
    from_sorted_slots,
    from_sorted_tokens,
    to_inverse_map,
    to_mask_map,
    to_moe_ops_map,
    to_routing_map,
    to_row_id_map,
    to_scatter_indices,
    to_sorted_slots,
    to_sorted_tokens,
)

__all__ = [
    "Layout",
    "from_expert_of_row",
    "from_group_counts",
    "from_group_ends",
    "from_inverse_map",
    "from_mask_map",
    "from_moe_ops_map",
    "from_padded_bins",
    "from_routing_map",
    "from_row_id_map",
    "from_scatter_indices",
    "from_sorted_slots",
    "from_sorted_tokens",
    "to_expert_of_row",
    "to_group_counts",
    "to_group_ends",
    "to_inverse_map",
    "to_mask_map",
    "to_moe_ops_map",
    "to_padded_bins",
    "to_routing_map",
    "to_row_id_map",
    "to_scatter_indices",
    "to_sorted_slots",
    "to_sorted_tokens",
]
