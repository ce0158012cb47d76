"""Processes, device mesh, and how a model is laid over it.

Starting and ending
    process_group.py   start_process_group: the one start-up; exchange_text_from_rank_zero, before it
    environment.py     which rank am I: one source, checked; rendezvous.py: where the ranks meet
    init.py            names of seed pages 000 and 003; shutdown.py, network.py, seeding.py behind them
Mesh and layout
    mesh.py            build_mesh: six axes, a group for each that is larger than 1, views at their first use
    parallelizer.py    parallelize, and the names of seed page 004
    replicas.py        wrap_replicas, whole_rows: what training and generation call
    apply_tp.py        tensor parallel: plans (tp_plan.py), styles (tensor_parallel.py; adapters.py for LoRA)
    context.py         context parallel: parts of rows, and attention over whole ones
    expert.py          expert parallel: experts on ranks of their own, tokens sent to them
    pipeline.py        pipeline parallel: stages (stages.py) under torch's schedules
    fsdp.py            sharded parameters, summed gradients
    gradient_sync.py   get_sync_ctx: the micro-batches whose backward reduces gradients
    mesh_groups.py  groups_of_mesh: the process groups and what each is for
    traffic.py         record_traffic, StepTraffic: calls and bytes of every collective, by group
Helpers that work in a single process too
    utils.py           names of seed pages 001 and 002
    ranks.py           get_rank, get_num_nodes, ...; collectives.py: exact values, ragged tensors, objects
    barriers.py        barriers with timeouts that hold; first_rank.py, turns.py: one after the other
    store_sync.py      what these wait through; groups.py: the members of a group and their nodes
    heartbeat.py       what ranks post of themselves, and which of them the others wait for

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
    from components.distributed.process_group import (
        DistInfo,
        exchange_text_from_rank_zero,
        start_process_group,
    )
    from components.distributed.ranks import is_rank_zero
    from components.distributed.replicas import whole_rows, wrap_replicas
    from components.distributed.seeding import stream
    from components.distributed.shutdown import destroy_global_state
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
