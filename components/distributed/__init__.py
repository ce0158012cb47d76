"""Process groups, the device mesh, and sharding a model over it.

Modules that keep the names and signatures of published libraries
    init.py              starting and ending a run (NeMo AutoModel init_utils, KempnerForge setup)
    utils.py             helpers that also work in a single process (NeMo AutoModel utils, OLMo-core utils)
    parallelizer.py      parallelize, and NeMo AutoModel's parallelizer functions, with FSDP2 and Megatron-FSDP;
                         wrap_replicas: the callable for training
Folder
    process/             start-up and shutdown, ranks, groups, barriers, ordering
One axis or concern each
    mesh.py              build_mesh: six axes, a process group per axis larger than 1, flattened views on first use;
                         groups_of_mesh: the process groups and their purposes, for the banner
    context_parallel.py  sequences sharded over cp, attention over full sequences
    row_shards.py        which tokens of a row a cp rank has; linear attention, Mamba-2 and convolutions over cp
    mixer_parallel.py    linear attention and Mamba-2 over tp, by heads
    expert.py            expert parallelism: sharded experts, tokens exchanged by all-to-all
    apply_tp.py          apply_tensor_parallel: applies a plan to a model; styles of linear layers with LoRA adapters
    tp_plan.py           transformers' plan of a model, its family's or the user's, adjusted to its heads and checked
    tensor_parallel.py   parallel styles that torch does not have
    pipeline_schedule.py Pipeline: this rank's stages under torch's schedules
    pipeline_stages.py   cut_into_stages: splits a model into stages, with placeholders for the others' modules
    fsdp.py              FSDP2 units, precision, prefetching; get_sync_ctx: deferred gradient reduction
    collectives.py       collectives on scalars, ragged tensors and objects, which compare types and shapes first

`init_distributed` exists in `utils` (OLMo-core) and `mesh` (KempnerForge), `_barrier_with_timeout` in `utils`
(NeMo AutoModel) and `init` (KempnerForge), with different signatures, so import them from those modules. The other
names below are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from components import package

if TYPE_CHECKING:
    from components.distributed.fsdp import unshard_fsdp2_model, unsharded_bytes
    from components.distributed.mesh import Mesh, build_mesh, groups_of_mesh, seed_ranks
    from components.distributed.parallelizer import parallelize, wrap_replicas
    from components.distributed.process.environment import bind_to_gpu
    from components.distributed.process.groups import is_rank_zero, stream
    from components.distributed.process.process_group import (
        DistInfo,
        destroy_global_state,
        exchange_text_from_rank_zero,
        start_process_group,
    )
    from components.distributed.tensor_parallel import whole_sequences
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
    __getattr__, __dir__ = package.lazy_names(__name__)
