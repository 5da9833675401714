"""Processes, meshes and shards: one model spread over ranks, and values exchanged between ranks.

This room speaks of ranks, device meshes, parameter shards (FSDP2, tensor parallel) and collectives.
Outside it only checkpoints and the weight sync use
`torch.distributed` directly.
"""

from selfplay.distributed.gather import box_at, gather_flat, local_part, shard_index, sharded_as
from selfplay.distributed.shard import (
    clip_grad_norm,
    fill_shards,
    full_tensor,
    plus_product,
    reshard,
    run_as_forward,
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
    close_world,
    exchange_objects,
    gather_objects,
    init_world,
    on_first_rank,
)

__all__ = [
    "World",
    "all_reduce_max",
    "all_reduce_sum",
    "barrier",
    "box_at",
    "broadcast_object",
    "clip_grad_norm",
    "close_world",
    "exchange_objects",
    "fill_shards",
    "full_tensor",
    "gather_flat",
    "gather_objects",
    "init_world",
    "local_part",
    "on_first_rank",
    "plus_product",
    "reshard",
    "run_as_forward",
    "shard",
    "shard_alone",
    "shard_index",
    "sharded_as",
    "vocab_shard",
]
