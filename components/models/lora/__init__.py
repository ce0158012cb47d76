"""Low-rank adapters: parameters added to frozen layers, which keep their names and weights.

linear.py   LoRA, DoRA and QLoRA on linear layers
product.py  the product of an adapter's factors, added to the layer's output
experts.py  LoRA on the fused matrices of experts
attach.py   add_adapters, and operations on all adapters of a model
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
