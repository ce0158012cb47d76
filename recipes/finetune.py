"""Fine-tuning of a Hugging Face causal LM on any mesh: every parameter, or adapters (LoRA).

python recipes/finetune.py                                              # SmolLM2-135M on Python's documentation
python recipes/finetune.py data=jsonl data.path=mine.jsonl              # your prompts and responses
python recipes/finetune.py parallelism=fsdp2_tp2 cluster=local_4proc    # another mesh, the same loss curve
python recipes/finetune.py experiment=lora_smollm2                      # LoRA; peft=lora with any model
python recipes/finetune.py run.dir=outputs/mine training.max_steps=200  # typed again, the command resumes
python recipes/finetune.py -m parallelism=ddp,fsdp2,fsdp2_tp2           # a sweep over meshes ends in one table
python recipes/finetune.py parallelism=fsdp2_tp4 cluster=slurm_8node    # from a login node: checks, submits, returns
torchrun --nproc-per-node 8 recipes/finetune.py model=llama3_1_8b       # your own launcher
"""

from __future__ import annotations

import time

from components import checkpoint, data, distributed, models, observability, training
from components.config.schema import FinetuneConfig
from components.launch import recipe, report_hang


@recipe("finetune")
def main(cfg: FinetuneConfig) -> None:
    """Runs on every rank, after the processes were started."""
    started = time.perf_counter()

    # Processes and mesh
    info = distributed.start_process_group(
        cfg.cluster.device,
        rendezvous_timeout=cfg.cluster.startup_timeout,
        collective_timeout=cfg.cluster.collective_timeout,
    )
    watch = training.Watchdog(cfg.training.step_timeout_seconds, report_hang)
    mesh = distributed.build_mesh(cfg.parallelism, info.device.type)
    distributed.seed_ranks(cfg.run.seed, mesh)

    # Batch arithmetic: a step is global_batch_size sequences, whatever the mesh
    plan = data.BatchPlan.of(cfg.training, mesh.rank("dp"), mesh.size("dp"))

    # Data: the order of samples is a function of (seed, step) alone
    tokenizer = models.load_tokenizer(cfg.model)
    train_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="train")
    eval_set = data.build_dataset(cfg.data, tokenizer, seq_len=cfg.training.seq_len, split="eval")
    padding = data.Padding.on(info.device, mesh.sequence_multiple, cfg.training.seq_len, tokenizer.pad_token_id)
    batches = data.TrainBatches(train_set, plan, seed=cfg.run.seed, padding=padding, fingerprint=train_set.fingerprint)
    facts = [plan.facts(train_set), eval_set.facts]

    # Model: shaped on the meta device, laid over the mesh, then given memory and filled shard by shard
    compute_dtype, why_dtype = training.compute_dtype(cfg.model, info.device)
    model = models.build_on_meta(cfg.model, len(tokenizer))
    models.add_adapters(model, cfg.peft)
    work = training.step_work(model, cfg.logging, mesh, info.device, compute_dtype)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, compute_dtype)
    router_loss = training.attach_router_loss(model, cfg.model, mesh)
    token_loss = training.attach_token_loss(model, cfg, mesh, layout.stages, info.device)
    recomputed = training.choose_checkpointing(model, cfg, mesh, info.device, compute_dtype)
    models.checkpoint_activations(model, recomputed.policy)
    if cfg.model.compile:
        models.compile_layers(model)
    models.materialize(model, info.device, offload=cfg.parallelism.cpu_offload)
    found = checkpoint.find_checkpoint(cfg.run.dir, cfg.run.resume)
    if found is None or cfg.peft.adapts:  # checkpoints hold what is trained
        models.fill_weights(model, cfg.model, cfg.run.seed)
    replica = watch.following(distributed.wrap_replicas(model, mesh, cfg.parallelism, layout))

    # Optimizer, over the sharded parameters
    optimizer = training.build_optimizer(model, cfg.optimizer)
    settings = training.StepSettings(
        device=info.device,
        max_grad_norm=cfg.training.max_grad_norm,
        defer_grad_sync=cfg.parallelism.defer_grad_sync,
        mesh=mesh,
        autocast=training.autocast_dtype(cfg.parallelism, cfg.model, compute_dtype),
        router_loss=router_loss,
        token_loss=token_loss,
        work=work,
    )

    # State, and where an earlier attempt left off; the report is first, as its imports draw random numbers
    title = observability.run_title(cfg.model, cfg.data, mesh.shape)
    report = observability.Reporter(cfg.logging, cfg.run.dir, info.is_main, cfg.training.max_steps, title)
    state = training.TrainState()
    if found is not None:
        saved = checkpoint.load_checkpoint(found, model, optimizer)
        state = training.TrainState.from_dict(saved["state"])
        batches.load_state_dict(saved["data"], cfg.run.accept_changes)
    state.optimizer = type(optimizer).__name__
    resumed_at = state.step

    def save(mark: checkpoint.Mark, last: bool = False) -> None:
        saver.save(state.step, {"state": state.to_dict(), "data": batches.state_dict()}, mark, last=last)
        clock.restart()

    # Reporting
    kernels = training.check_kernels(replica, cfg, batches.at, settings)
    counts = models.count_parameters(model)
    observability.print_banner(
        report.console,
        observability.Facts(
            run_dir=cfg.run.dir,
            mesh=mesh.shape,
            coordinates=mesh.coordinates,
            device=info.device,
            batch=f"{plan}, up to {cfg.training.seq_len} tokens each",
            model=f"{cfg.model.path or 'from scratch'}: {counts}, {cfg.model.dtype}, {why_dtype}",
            local_bytes=counts.local_bytes,
            groups=[str(group) for group in distributed.groups_of_mesh(mesh)],
            notes=[*facts, *layout.notes, router_loss, token_loss, recomputed, work, *kernels],
        ),
    )
    for index in range(min(cfg.logging.examples, len(train_set))):
        report.say(f"\nexample {index}, what carries loss in [[ ]]:\n{train_set.show(index)}")
    if found is not None:
        report.say(f"resumed from {found}")
    report.continue_from(state.step)

    def evaluate() -> float | None:
        held_out = data.eval_batches(eval_set, plan.micro_batch_size, plan.dp_rank, plan.dp_size, padding)
        with report.status("evaluating"):
            loss, tokens = training.evaluate(replica, held_out, settings, stop.agreed)
        report.evaluation(step=state.step, eval_loss=loss, tokens=tokens)
        return loss if tokens else None

    def show_generations() -> None:
        prompts = [*data.sample_prompts(eval_set, cfg.generation.samples), *cfg.generation.prompts]
        with report.status("generating"), distributed.whole_rows(replica, mesh, cfg.parallelism) as forward:
            answers = models.generate(model, tokenizer, prompts, cfg.generation.max_new_tokens, forward, stop.agreed)
        report.generations(prompts, answers, when=f"after {state.step} steps")

    def record(*steps: training.StepMetrics) -> None:
        for step in steps:
            state.record(step)
            lr = training.learning_rate(cfg.optimizer, step.step - 1, cfg.training.max_steps)
            report.step(step, lr=lr, tokens=state.tokens, every=cfg.training.log_every)
            state.refuse_to_diverge(step, cfg.training)

    # The loop: numbers arrive one step late, so that the host never waits for the device
    reader, clock = training.StepReader(lag=1), training.SaveClock(cfg.checkpoint.every_minutes)
    traffic = distributed.StepTraffic(mesh, report.traffic, enabled=cfg.logging.comm)
    profile = observability.StepProfile(cfg.logging.profile, cfg.run.dir, report.say)
    saver = checkpoint.Saver(cfg.run.dir, model, optimizer, cfg.checkpoint, report.say)
    stop = training.StopRequest(info.device)
    with report, stop, watch, saver, training.GarbageOffTheStep(cfg.training.gc_every) as gc:
        eval_loss = evaluate()
        state.begin(eval_loss)
        show_generations()
        while state.step < cfg.training.max_steps and not stop.stopped:
            began = time.perf_counter()
            training.set_learning_rate(optimizer, cfg.optimizer, state.step, cfg.training.max_steps)
            with traffic.step(), watch.step(state.step + 1), profile.step(), gc.step():
                asked = (*stop.flags(), clock.due())
                numbers = training.train_step(replica, report.next_batch(batches), optimizer, settings, asked)
            state.step += 1
            due_eval = cfg.training.eval_every and state.step % cfg.training.eval_every == 0
            due_save = cfg.checkpoint.every and state.step % cfg.checkpoint.every == 0
            arrived = reader.push(state.step, numbers, began, drain=bool(due_eval or due_save))
            record(*arrived)
            if stop.heed(arrived):
                break
            due_by_time = any(step.must_save for step in arrived)
            if due_by_time:
                record(*reader.flush())
            if due_eval and state.step < cfg.training.max_steps:
                eval_loss = evaluate()
            if (due_save or due_by_time) and state.step < cfg.training.max_steps and not stop.stopped:
                save(checkpoint.Mark(eval_loss if due_eval else None, ephemeral=not due_save))

        # Finish: the last numbers, the last evaluation, what remains of the run
        record(*reader.flush())
        if not stop.stopped:
            eval_loss = evaluate()
        if (state.step > resumed_at or not (found or stop.stopped)) and (cfg.checkpoint.last or stop.stopped):
            save(checkpoint.Mark(None if stop.stopped else eval_loss), last=True)
        saver.wait()
        if not stop.stopped:
            show_generations()
            if cfg.checkpoint.export and not stop.stopped:
                card = observability.model_card(cfg.run.dir, state.to_dict(), str(mesh.shape))
                for folder in models.export_run(model, tokenizer, cfg.run.dir, cfg.model, cfg.peft, card):
                    report.say(f"exported {folder}")
        report.finish(
            observability.Result(
                status=stop.status,
                steps=state.step,
                mesh=str(mesh.shape),
                processes=info.world_size,
                compute_dtype=str(compute_dtype).removeprefix("torch."),
                wall_seconds=round(time.perf_counter() - started, 1),
                **observability.peak_memory(info.device),
                first_loss=state.first_loss,
                last_loss=state.last_loss,
                first_eval_loss=state.first_eval_loss,
                eval_loss=eval_loss,
                skipped_steps=state.skipped,
            )
        )


if __name__ == "__main__":
    main()
