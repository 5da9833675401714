"""Processes, meshes and shards: one model spread over ranks, and values exchanged between ranks.

This room handles ranks, device meshes, parameter shards (FSDP2, tensor parallel) and collectives.
Elsewhere only checkpoints, weight sync and Muon's shards use `torch.distributed` directly.
"""

from selfplay.distributed.gather import box_at, gather_flat, local_part, shard_index, sharded_as
from selfplay.distributed.shard import (
    as_forward,
    clip_grad_norm,
    fill_shards,
    full_tensor,
    plus_product,
    reshard,
    shard,
    shard_alone,
    vocab_shard,
)
from selfplay.distributed.world import (
    World,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    broadcast_object,
    check_switches,
    close_world,
    exchange_objects,
    gather_objects,
    init_world,
    on_first_rank,
    raise_on_all_ranks,
    torch_switches,
)
