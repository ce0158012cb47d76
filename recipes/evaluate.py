"""Held-out loss, perplexity and sample texts of a checkpoint, an export, or any Hugging Face model.

python recipes/evaluate.py                                                       # the model as it comes
python recipes/evaluate.py model.path=outputs/finetune/RUN/export                # an export
python recipes/evaluate.py evaluation.checkpoint=outputs/finetune/RUN/checkpoints/step_40
python recipes/evaluate.py peft=lora evaluation.checkpoint=...                   # of a run with adapters
python recipes/evaluate.py model=qwen3_0_6b data=gsm8k parallelism=fsdp2_tp2     # another model, data set and mesh
"""

from __future__ import annotations

import math
import time

from components import checkpoint, data, distributed, models, observability, training
from components.config.schema import EvaluateConfig
from components.launch import recipe
from components.protocol.failures import report_hang


@recipe("evaluate")
def main(cfg: EvaluateConfig) -> None:
    """Runs on every rank, after the processes were started."""
    started = time.perf_counter()

    # Processes and mesh
    info = distributed.start_process_group(
        cfg.cluster.device,
        rendezvous_timeout=cfg.cluster.startup_timeout,
        collective_timeout=cfg.cluster.collective_timeout,
    )
    watch = training.Watchdog(cfg.evaluation.step_timeout_seconds, report_hang, "evaluation")
    mesh = distributed.build_mesh(cfg.parallelism, info.device.type)
    distributed.seed_ranks(cfg.run.seed, mesh)

    # Data: every held-out sample is seen by exactly one data-parallel rank
    tokenizer = models.load_tokenizer(cfg.model)
    eval_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.evaluation.seq_len, split="eval")
    padding = data.Padding.on(info.device, mesh.sequence_multiple, cfg.evaluation.seq_len, tokenizer.pad_token_id)
    held_out = data.eval_batches(eval_set, cfg.evaluation.micro_batch_size, mesh.rank("dp"), mesh.size("dp"), padding)

    # Model: laid over the mesh on the meta device, then filled shard by shard
    compute_dtype, why_dtype = training.compute_dtype(cfg.model, info.device)
    model = models.build_on_meta(cfg.model, len(tokenizer))
    models.add_adapters(model, cfg.peft, exports=False)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, compute_dtype)
    token_loss = training.attach_token_loss(model, cfg, mesh, layout.stages, info.device)
    if cfg.model.compile:
        models.compile_layers(model)
    models.materialize(model, info.device, offload=cfg.parallelism.cpu_offload)
    if cfg.evaluation.checkpoint is None or cfg.peft.adapts:  # checkpoints hold what was trained
        models.fill_weights(model, cfg.model, cfg.run.seed)
    if cfg.evaluation.checkpoint is not None:
        checkpoint.load_model_weights(cfg.evaluation.checkpoint, model)

    replica = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    watch.follow(replica)

    # Reporting
    report = observability.Reporter(cfg.logging, cfg.run.dir, enabled=info.is_main)
    counts = models.count_parameters(model)
    source = cfg.evaluation.checkpoint or cfg.model.path or "from scratch"
    observability.print_banner(
        report.console,
        observability.Facts(
            run_dir=cfg.run.dir,
            mesh=mesh.shape,
            coordinates=mesh.coordinates,
            device=info.device,
            batch=f"{cfg.evaluation.micro_batch_size} sequences x {mesh.size('dp')} dp at a time",
            model=f"{source}: {counts}, {cfg.model.dtype}, {why_dtype}",
            local_bytes=counts.local_bytes,
            groups=[str(group) for group in distributed.groups_of_mesh(mesh)],
            notes=[eval_set.facts, *layout.notes, token_loss],
        ),
    )

    # Evaluation
    settings = training.StepSettings(
        device=info.device,
        mesh=mesh,
        autocast=training.autocast_dtype(cfg.parallelism, cfg.model, compute_dtype),
        token_loss=token_loss,
    )
    with report, training.StopRequest(info.device) as stop, watch:
        loss, tokens = training.evaluate(replica, held_out, settings, stop.agreed)
        report.evaluation(step=0, eval_loss=loss, tokens=tokens)
        if tokens:
            report.say(f"perplexity {math.exp(loss):.3f} per target token")
        for name, source in data.sources_of(eval_set).items():
            of_source = data.eval_batches(
                source, cfg.evaluation.micro_batch_size, mesh.rank("dp"), mesh.size("dp"), padding
            )
            source_loss, source_tokens = training.evaluate(replica, of_source, settings, stop.agreed)
            if not stop.stopped:
                report.say(f"{name}: held-out loss {source_loss:.4f} over {source_tokens:,} target tokens")
        prompts = [*data.sample_prompts(eval_set, cfg.generation.samples), *cfg.generation.prompts]
        with distributed.whole_rows(replica, mesh, cfg.parallelism) as forward:
            answers = models.generate(model, tokenizer, prompts, cfg.generation.max_new_tokens, forward, stop.agreed)
        report.generations(prompts, answers, when="(greedy)")
        report.finish(
            observability.Result(
                status=stop.status,
                steps=0,
                mesh=str(mesh.shape),
                processes=info.world_size,
                compute_dtype=str(compute_dtype).removeprefix("torch."),
                wall_seconds=round(time.perf_counter() - started, 1),
                **observability.peak_memory(info.device),
                eval_loss=loss if tokens else None,
            )
        )


if __name__ == "__main__":
    main()
