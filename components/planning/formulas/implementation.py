"""Choices of a training program that a workload does not state. The defaults are Meshbook's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Implementation:
    """What a training program sends, recomputes and overlaps. Other values describe other programs."""

    name: str = "Meshbook"
    eager_hidden: float = 9.4
    """Bytes that norms and residuals move uncompiled, relative to fused kernels. Meshbook's: the layers of Llama 3.2 1B
    move 679 GB per 32,768 trained tokens, apart from matmuls and attention, by the sizes of all operators' tensors."""
    adapter_passes: tuple[float, float] = (1.5, 3.4)
    """Reads and writes of a linear layer's input and output for its adapter, forward and backward. Meshbook's: A and B
    read the input and the output gradient twice; their products are added to the output and to the input gradient."""
    tp_gathers: int = 2
    """All-gathers of hidden states over tp in a layer's forward: one before attention, one before the MLP."""
    float8_gathers: bool = False
    """Whether float8 casts hidden states before tp gathers them."""
    tp_overlap: float = 0.0
    """Share of the tp communication that runs beside matmuls (asynchronous tensor parallelism)."""
    shards_head: bool = True
    """Whether tp shards the LM head over the vocabulary."""
    gathers_logits: bool = False
    """Whether the logits of a sharded head are all-gathered over tp for the loss."""
    selective_matmuls: float = 0.0
    """Share of the matmuls that activation_checkpointing=selective recomputes."""
    compiles_recomputation: bool = False
    """Whether the compiler sees the recomputation of a layer, and leaves out what the backward does not need: the last
    matmul and its communication. Without a compiler, torch stops before them."""
    gather_bytes: int | None = None
    """Bytes per element of all-gathered parameters; None: those of activations."""
    reduce_bytes: int = 4
    """Bytes per element of reduced gradients."""
    attention_speed: float = 1.0
    """Speed of its attention kernel, relative to torch's flash attention."""
    ring_attention: float = 0.0
    """Speed of attention over cp with keys and values passed around a ring or gathered, relative to one kernel; 0: the
    program follows parallelism.cp_attention."""
    waits_for_routing: bool = True
    """Whether the host waits for the routing of the tokens in each layer with expert parallelism."""
    expert_imbalance: float = 1.15
    """Tokens of the fullest ep rank, relative to the mean. 1 if the routing is forced to be even."""


MESHBOOK = Implementation()
