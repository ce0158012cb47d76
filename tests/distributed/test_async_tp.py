"""parallelism.async_tp: the compiler fuses the collectives of sequence parallelism with the matmuls beside them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
from torch._inductor.fx_passes.post_grad import remove_noop_ops, view_to_reshape
from torch.testing._internal.distributed.fake_pg import FakeStore

from components import distributed, models
from components.config.schema import ParallelismConfig
from tests.distributed.parity import SMALL, build
from tests.harness import run_ranks

LLAMA = {**SMALL, "model_type": "llama", "vocab_size": 96, "num_hidden_layers": 1, "tie_word_embeddings": False}


def fused_operators(rank: int) -> tuple[list[str], list[str], Any]:
    """Return the collectives in the graphs of a compiled layer's forward and backward, and the compiler's options."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.is_nccl_available = lambda: True  # a CPU build has none, and the compiler asks for it
    model: Any = build("llama", torch.float32, LLAMA)
    models.use_causal_sdpa(model)
    config = ParallelismConfig(dp_shard=1, tp=2, sequence_parallel=True, async_tp=True)
    mesh = distributed.build_mesh(config, "cpu")
    distributed.parallelize(model, mesh, config, torch.float32)
    found: list[list[str]] = []
    options: list[Any] = []

    def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Any:
        remove_noop_ops(module.graph)
        view_to_reshape(module)
        copy = torch.fx.GraphModule(module, module.graph.__class__())
        copy.graph.output(copy.graph.graph_copy(module.graph, {}))
        micro_pipeline_tp_pass(copy.graph)
        names = [str(node.target) for node in copy.graph.nodes if node.op == "call_function"]
        kinds = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter", "all_gather_into_tensor", "reduce_scatter_")
        found.append([kind for name in names for kind in kinds if f".{kind}" in name])
        return make_boxed_func(module.forward)

    compiler = aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph, decompositions=select_decomp_table())

    def backend(module: Any, inputs: Any, **keywords: Any) -> Any:
        options.append(keywords["options"])
        return compiler(module, inputs)

    models.compile_layers(model, backend=backend, async_tp=mesh["tp"].get_group())
    tokens = torch.arange(64).view(2, 32)
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return found[0], found[1], options


def test_collectives_are_fused_with_matmuls() -> None:
    """In the backward, a reduce-scatter sums the outputs of several matmuls, which torch does not fuse."""
    ((forward, backward, options),) = run_ranks(1, fused_operators, init=False, timeout=120)
    assert forward == 2 * ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
    assert backward == 2 * ["fused_all_gather_matmul", "reduce_scatter_"]
    assert options == [{"_micro_pipeline_tp": True}]
