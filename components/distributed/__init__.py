"""Processes, device mesh, and how a model is sharded over it.

Front doors (the names of the seed pages)
    init.py, mesh.py, parallelizer.py, utils.py
Folders
    process/           start-up and end, ranks, groups, barriers, ordering
    tensor/            tensor parallel: plans and styles
    pipeline/          pipeline parallel: stages under torch's schedules
One axis or concern each
    mesh.py            build_mesh: six axes, a group for each that is larger than 1, views at their first use
    parallelizer.py    parallelize, and the names of seed page 004
    replicas.py        wrap_replicas, whole_rows: what training and generation call
    context_parallel.py  parts of rows, and attention over whole ones
    expert.py          expert parallel: experts on ranks of their own, tokens sent to them
    fsdp.py            sharded parameters, summed gradients; megatron.py: Megatron-FSDP
    gradient_sync.py   get_sync_ctx: the micro-batches whose backward reduces gradients
    collectives.py     exact values, ragged tensors, objects
    mesh_groups.py     groups_of_mesh: the process groups and what each is for
    traffic.py         record_traffic, StepTraffic: calls and bytes of every collective, by group

`init_distributed` and `_barrier_with_timeout` exist twice, with the meanings of their seed pages: import
them from `init`, `utils` or `mesh`. Names are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import lazy

if TYPE_CHECKING:
    from components.distributed.mesh import Mesh, build_mesh, seed_ranks
    from components.distributed.mesh_groups import groups_of_mesh
    from components.distributed.parallelizer import parallelize
    from components.distributed.process.process_group import (
        DistInfo,
        exchange_text_from_rank_zero,
        start_process_group,
    )
    from components.distributed.process.ranks import is_rank_zero
    from components.distributed.process.seeding import stream
    from components.distributed.process.shutdown import destroy_global_state
    from components.distributed.replicas import whole_rows, wrap_replicas
    from components.distributed.traffic import StepTraffic, record_traffic
    from components.distributed.utils import (
        FirstRankPerNode,
        all_gather,
        all_gather_object,
        all_reduce_value,
        barrier,
        barrier_and_log,
        broadcast_object,
        do_n_at_a_time,
        dp_eval_sample_shard,
        synchronize_flag,
        synchronize_value,
    )
else:
    __getattr__ = lazy.attach(__name__)
