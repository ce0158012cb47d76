"""Low-rank adapters: parameters added to frozen layers, which keep their names and weights.

linear.py  LoRA, DoRA and QLoRA on linear layers, and the matmuls of an adapter's factors
attach.py  add_adapters, operations on all adapters of a model, and LoRA on the fused matrices of experts
"""

from components.models.lora.attach import (
    LoraExperts,
    adapted_layers,
    adapters_off,
    add_adapters,
    expert_factors,
    initialize_adapters,
    quantized_layers,
    scaling_of,
)
from components.models.lora.linear import ADAPTER_PARAMETERS, LoraLayer, row_norms
