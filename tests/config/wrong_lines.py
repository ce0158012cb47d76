"""Command lines with one config error each, and what its message must contain: value, rule and key.

A row has the command line and the required parts of the message. Rows that need files are next to their tests in
test_wrong_configurations.py.
"""

from __future__ import annotations

UNKNOWN_KEY = [
    ("training.max_step=3", "no such key", "did you mean training.max_steps?"),
    ("model.head=9", "no such key", "did you mean model.heads?"),
    ("parallelism.tpp=2", "no such key", "did you mean parallelism.tp?"),
    ("logging.wandb.mod=online", "no such key", "did you mean logging.wandb.mode?"),
    ("trainig.max_steps=3", "no such key", "did you mean training.max_steps?"),
    ("max_step=3", "no such key", "did you mean training.max_steps?"),
    ("training.lr=1", "no such key", "did you mean optimizer.lr?"),
    ("xyzzy=3", "xyzzy=3: no such key"),
    ("+training.max_step=3", "training.max_step=3: no such key", "did you mean training.max_steps?"),
    ("+trainig.max_steps=3", "trainig.max_steps=3: no such key", "did you mean training.max_steps?"),
    ("+logging.wandb.projet=x", "no such key", "did you mean logging.wandb.project?"),
    ("++run.sed=1", "run.sed=1: no such key", "did you mean run.seed?"),
    ("++xyzzy=3", "xyzzy=3: no such key"),
    ("gpu=h100_80", "gpu=h100_80: no such key; write cluster.gpu=h100_80"),
    ("-m gpu=h100_80,b200", "no such key; did you mean cluster.gpu?"),
    ("cluster.env.V=null", "cluster.env.V=null: must not be null"),
    ("training={max_stepz:3}", "training.max_stepz=3: no such key", "did you mean training.max_steps?"),
    (
        "data.path=x.jsonl",
        *(
            "the chosen option of data has no such key",
            "add data=jsonl",
            "data=NAME that has it (text, tokens, chat_jsonl, ",
        ),
    ),
    (
        "data=pydocs data.prompt_column=q",
        "add data=jsonl data.path=..., or another data=NAME that has it (gsm8k, alpaca)",
    ),
    ("data.prompt_column=q", "add data=jsonl data.path=..., or another data=NAME that has it (gsm8k, alpaca)"),
    (
        "data.chosen_column=q",
        "this recipe accepts none of the kinds that have it (preferences); remove it",
    ),
    ("data=jsonl data.path=x data.messages_column=q", "data.messages_column=q", "no such key; add data=chat_jsonl"),
    ("data.factory=a:b", "data.factory=a:b: the chosen option of data has no such key; add data=custom"),
    ("learning_rate=3e-4", "learning_rate=3e-4: no such key; did you mean optimizer.lr?"),
    ("epochs=3", "epochs=3: no such key; did you mean training.epochs?"),
    ("batch_size=32", "batch_size=32: no such key; did you mean training.global_batch_size?"),
    ("training.per_device_train_batch_size=2", "did you mean training.micro_batch_size?"),
    ("lora_r=8", "lora_r=8: no such key; did you mean peft.rank?"),
    ("peft=lora peft.r=8", "peft.r=8: no such key; did you mean peft.rank?"),
    ("bf16=true", "bf16=true: no such key; did you mean model.compute_dtype=bfloat16?"),
    ("use_lora=true", "use_lora=true: no such key; did you mean peft=lora?"),
    ("max_seq_length=512", "did you mean training.seq_len?"),
    ("output_dir=x", "did you mean run.dir?"),
    (
        "--learning-rate=3",
        "--learning-rate=3: no such option",
        "write settings as KEY=VALUE; did you mean optimizer.lr?",
    ),
    ("--xyzzy", "--xyzzy: no such option, see --help"),
]
WRONG_TYPE = [
    ("training.max_steps=abc", "training.max_steps=abc: must be a whole number"),
    ("training.epochs=abc", "training.epochs=abc: must be a number"),
    ("training.max_steps=4.5", "training.max_steps=4.5: must be a whole number"),
    ("training.max_steps=true", "must be a whole number"),
    ("training.max_steps=[1,2]", "must be a whole number"),
    ("training.max_steps=", "training.max_steps", "must be a whole number"),
    ("++training.max_steps=abc", "must be a whole number"),
    ("optimizer.lr=fast", "optimizer.lr=fast: must be a number"),
    ("optimizer.betas=3", "optimizer.betas=3: must be a list"),
    ("optimizer.betas=[a,b]", "must be a number"),
    ("logging.plot=maybe", "logging.plot=maybe: must be true or false"),
    ("run.seed=null", "run.seed=null: must not be null"),
    ("run.dir=[a]", "run.dir=[a]: must be a single value"),
    ("run.dir=s3://bucket/run", "run.dir=s3://bucket/run: must be a local path; checkpoint.remote copies"),
    ("training=3", "training=3: is a section with keys"),
    ("logging.plot=1", "logging.plot=1: must be true or false"),
    ("model.compile=7", "model.compile=7: must be auto, true or false"),
    ("data.pack=1", "data.pack=1: must be true or false"),
    ("++logging.plot=0", "must be true or false"),
    ("logging={plot:2}", "must be true or false"),
    ("optimizer.lr=true", "optimizer.lr=true: must be a number"),
    ("logging.profile.ranks=[true]", "must be a whole number"),
    ("training.max_steps=99999999999999999999", "training.max_steps=99999999999999999999: must fit in 64 bits"),
]
WRONG_CHOICE = [
    ("parallelism.strategy=fsdp", "must be one of single, ddp, fsdp2", "did you mean fsdp2?"),
    ("model.router_aux=hf", "must be one of none, sequence"),
    ("model.compute_dtype=fp16", "must be one of auto, bfloat16, float32, float64"),
    ("cluster.device=gpu", "must be one of auto, cpu, cuda"),
    ("cluster.kind=pbs", "must be one of local, slurm"),
    ("optimizer.schedule=cosin", "must be one of", "did you mean cosine?"),
    ("logging.wandb.mode=on", "must be one of disabled, offline, online"),
    ("data.kind=sftt", "must be one of docs, sft, chat, text, custom, mixture", "did you mean sft?"),
    ("parallelism.uneven_heads=split", "must be one of replicate, refuse"),
    (
        "model=tiny_moe model.compile=true model.dtype=float64",
        "model.compile=true: experts in float64",
        "set model.compile=false, or model.dtype=float32",
    ),
]
MISSPELT_GROUP_OR_OPTION = [
    ("paralelism=fsdp2", "paralelism=fsdp2: no such key", "did you mean parallelism?"),
    ("parallelism=fsdp3", "no such option", "did you mean fsdp2?", "hsdp"),
    ("data=jsonll", "no such option", "did you mean jsonl?"),
    ("data=preferencs", "data=preferencs: no such option (there are: alpaca, "),
    ("experiment=smok", "no such option", "did you mean smoke?"),
    ("+training.max_steps=30", "write training.max_steps=30 without the plus"),
    ("+experiment=smoke", "write experiment=smoke without the plus"),
    ("cluster=slurm_8nodes", "no such option", "did you mean slurm_8node?", "local_2proc"),
    ("network=infiniband", "no such option", "socket"),
    ("parallelism=3", "must be the name of an option", "fsdp2_tp2"),
]
MISSING_VALUE = [
    ("data=jsonl", "data.path: not set", "set data.path="),
    ("data=chat_jsonl", "data.path: not set"),
    ("data=jsonl data.path=null", "data.path=null: must not be null"),
    ("data=jsonl data.path=''", "data.path='': is empty"),
    ("training.max_steps=???", "training.max_steps=???: '???' marks a missing value"),
    ("~data", "data: not set"),
    ("model=tiny model.init=pretrained", "model.path=null: pretrained weights need a path", "model.init=random"),
]
OUT_OF_RANGE = [
    ("model.rope.factor=4", "model.rope.factor=4.0: model.rope.type=none does not scale positions; add model/rope="),
    ("model/rope=yarn model.rope.factor=1", "model.rope.factor=1.0: must be greater than 1"),
    ("model/rope=linear model.rope.factor=null", "model.rope.factor=null: model.rope.type=linear needs a factor"),
    ("model/rope=linear model.rope.beta_fast=8", "model.rope.beta_fast=8.0: only model.rope.type=yarn has this key"),
    ("model/rope=yarn model.rope.beta_slow=40", "model.rope.beta_slow=40.0: must be less than model.rope.beta_fast=32"),
    ("model/rope=dynamic", "model/rope=dynamic: no such option", "(there are: linear, llama3, none, yarn)"),
    (
        "model/rope=yarn +model.config.rope_parameters={rope_theta:1}",
        "model.rope.type=yarn: model.config.rope_parameters is set too; set one of them",
    ),
    (
        "model/rope=yarn model.config.model_type=gpt2",
        "model.rope.type=yarn: the model has no rotary position embeddings that transformers can scale",
    ),
    ("evaluation.tasks=[a] evaluation.num_fewshot=-1", "evaluation.num_fewshot=-1: must be at least 0"),
    ("evaluation.tasks=[a] evaluation.batch_size=0", "evaluation.batch_size=0: must be at least 1"),
    ("evaluation.tasks=[a] evaluation.limit=0", "evaluation.limit=0.0: must be greater than 0"),
    ("evaluation.tasks=[a] evaluation.limit=2.5", "evaluation.limit=2.5: must be a whole number of documents, or a"),
    ("evaluation.tasks=[a] evaluation.every=-1", "evaluation.every=-1: must be at least 0"),
    ("evaluation.tasks=[a,b,a]", "evaluation.tasks=['a', 'b', 'a']: must name each task once"),
    ("evaluation.every=5", "evaluation.every=5: has no effect without tasks; set evaluation.tasks"),
    ("evaluation.task_path=x", "evaluation.task_path=x: has no effect without tasks; set evaluation.tasks"),
    ("generation.temperature=-1", "generation.temperature=-1.0: must be at least 0"),
    ("generation.top_p=0", "generation.top_p=0.0: must be greater than 0 and at most 1"),
    (
        "generation.top_p=0.9",
        "generation.top_p=0.9: has no effect on greedy generation (generation.temperature=0); set generation.temp",
    ),
    ("generation.seed=-1", "generation.seed=-1: must lie between 0 and"),
    ("optimizer.lr=-1", "optimizer.lr=-1.0: must be greater than 0"),
    ("training.max_steps=0", "training.max_steps=0: must be at least 1"),
    ("training.epochs=0", "training.epochs=0.0: must be greater than 0"),
    ("training.epochs=nan", "training.epochs=nan: must be greater than 0, and a finite number"),
    (
        "training.epochs=2.5 training.max_steps=40",
        "training.epochs=2.5: the run also has training.max_steps=40; give one of the two, and set the other to null",
    ),
    ("training.stop_after_skipped=-1", "training.stop_after_skipped=-1: must be at least 0"),
    (
        "training.step_timeout_seconds=-1",
        "training.step_timeout_seconds=-1",
        "must be 0 (never time out) or at least 1",
    ),
    ("training.step_timeout_seconds=0.5", "training.step_timeout_seconds=0.5", "must be 0 (never time out)"),
    ("training.step_timeout_seconds=inf", "training.step_timeout_seconds", "must be 0 (never time out) or at least 1"),
    ("training.step_timeout_seconds=never", "training.step_timeout_seconds=never: must be a number"),
    ("training.step_timeout=60", "no such key", "did you mean training.step_timeout_seconds?"),
    ("checkpoint.keep=0", "checkpoint.keep=0: must be at least 1"),
    ("checkpoint.every_minutes=-1", "checkpoint.every_minutes=-1", "must be at least 0"),
    ("checkpoint.every=6 checkpoint.keep_every=10", "checkpoint.keep_every=10: must be a multiple of", "every=6"),
    ("checkpoint.keep_best=true training.eval_every=0", "checkpoint.keep_best=true: needs", "set training.eval_every"),
    ("checkpoint.keep_best=true", "checkpoint.every=0 to be a multiple of training.eval_every=20"),
    ("checkpoint.keep_best=true checkpoint.every=30", "checkpoint.every=30 to be a multiple of", "eval_every=20"),
    ("optimizer.lr=inf", "optimizer.lr=inf: must be greater than 0, and a finite number"),
    ("optimizer.eps=1e400", "optimizer.eps=inf: must be greater than 0, and a finite number"),
    ("optimizer.weight_decay=nan", "optimizer.weight_decay=nan: must be at least 0, and a finite number"),
    ("training.max_grad_norm=inf", "training.max_grad_norm=inf: must be at least 0, and a finite number"),
    ("cluster.startup_timeout_minutes=1e300", "startup_timeout_minutes=1e+300: must lie between 0.01 and 525600"),
    ('cluster.procs_per_node="²"', "cluster.procs_per_node=²: must be auto or a number of processes"),
    ("run.seed=-1", "run.seed=-1: must lie between 0"),
    ("model=tiny_moe model.router_aux_coef=-0.1", "model.router_aux_coef=-0.1: must be at least 0"),
    ("model.window=0", "model.window=0: must be at least 1"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be two numbers"),
    ("optimizer=muon optimizer.ns_steps=0", "optimizer.ns_steps=0: must be at least 1"),
    ("optimizer=muon optimizer.ns_steps=100", "optimizer.ns_steps=100: must be less than 100"),
    ("optimizer=muon optimizer.momentum=1", "optimizer.momentum=1.0: must be in [0, 1)"),
    ("optimizer=muon optimizer.adamw_lr=0", "optimizer.adamw_lr=0.0: must be greater than 0"),
    ("optimizer=muon optimizer.ns_dtype=int8", "optimizer.ns_dtype=int8", "bfloat16, float32, float64"),
    ("optimizer=muon peft=lora", "optimizer.kind=muon", "peft.method=lora", "optimizer=adamw"),
    ("optimizer=sgd optimizer.momentum=0 optimizer.nesterov=true", "optimizer.nesterov=true", "optimizer.momentum"),
    ("optimizer=custom", "optimizer.factory: not set, and it has no default"),
    ("optimizer=custom optimizer.factory=mine", "optimizer.factory=mine: must be module:function"),
    ("optimizer=custom optimizer.factory=nowhere:f", "optimizer.factory=nowhere:f: no module named 'nowhere'"),
    ("optimizer.ns_steps=3", "optimizer.ns_steps=3", "add optimizer=muon"),
    ("data.eval_fraction=1.5", "data.eval_fraction=1.5"),
    ("training.early_stop_patience=0", "training.early_stop_patience=0: must be at least 1"),
    (
        "training.early_stop_patience=1 training.eval_every=0",
        "training.early_stop_patience=1",
        "set training.eval_every",
    ),
    ("training.early_stop_min_delta=1", "training.early_stop_min_delta=1.0", "training.early_stop_patience; set it"),
    ("training.ema_decay=1", "training.ema_decay=1.0: must be greater than 0 and less than 1, or null"),
    (
        "training.eval_weights=both",
        "training.eval_weights=both: there are no averaged weights",
        "set training.ema_decay",
    ),
    (
        "data.eval_split=null data.eval_fraction=0 training.eval_every=0",
        *(
            "data.eval_fraction=0.0: nothing is held out, but every run evaluates at the end",
            "set it above 0",
        ),
    ),
    (
        "data.pack=true model.attention=eager",
        "model.attention=eager: does not receive the document bounds",
        "set model.attention=sdpa or",
    ),
    (
        "model.attention=eager parallelism=fsdp2_cp2 data.pack=false",
        "model.attention=eager: parallelism.cp=2 splits rows, which sdpa supports",
        "set parallelism.cp=1",
    ),
    ("cluster.procs_per_node=0", "cluster.procs_per_node=0", "1 or more"),
    ("cluster.dry_run=maybe", "cluster.dry_run=maybe: must be true, plan, render or false"),
    ("cluster.dry_run=render", "a local run has no batch script and no manifest; set cluster=slurm_1node"),
    ("cluster.nodes=2", "cluster.nodes=2", "set cluster.nodes=1"),
]
MESH = [
    ("parallelism=tp2 cluster.procs_per_node=3", "tp 2 = 2 processes, but there are 3", "cluster.procs_per_node=2"),
    ("parallelism=fsdp2_tp2 cluster.procs_per_node=3", "3 processes cannot be divided by tp 2 = 2"),
    ("parallelism=single cluster=local_2proc", "1 = 1 process, but there are 2", "cluster.procs_per_node=1"),
    ("parallelism=hsdp cluster.procs_per_node=5", "5 processes cannot be divided by dp_shard 2 = 2"),
    ("parallelism.dp_replicate=-1", "dp_replicate=-1 and parallelism.dp_shard=-1", "only one axis"),
    ("parallelism.tp=0", "parallelism.tp=0: must be at least 1, or -1"),
    (
        "parallelism=ddp parallelism.tp=2",
        "parallelism.tp=2: strategy ddp has no such axis",
        "parallelism.strategy=fsdp2",
    ),
    ("parallelism.tp_plan=a:", "parallelism.tp_plan=a:: is not an import path; write package.module:name"),
    ("parallelism.tp_plan=no_such_module:plan", "no module named 'no_such_module'", "next to the recipe"),
    (
        "cluster.procs_per_node=4001 training.global_batch_size=4001",
        *("cluster.procs_per_node=4001: 4001 processes on this machine", "the limit is 4 per core"),
        "cluster.oversubscribe=true",
    ),
    (
        "parallelism.dp_replicate=4001 training.global_batch_size=4001",
        *("parallelism.dp_replicate=4001: 4001 processes on this machine", "cluster.oversubscribe=true"),
    ),
    ("parallelism.tp=3", "parallelism.tp=3: does not divide the 160 features of the model's MLPs"),
    ("model=smollm2_135m parallelism.tp=5", "parallelism.tp=5: does not divide the 1536 features"),
    (
        "model=tiny model.config.model_type=bamba parallelism=pp2_1f1b",
        "parallelism.pp=2: the forward of bamba models cannot be split into stages; set parallelism.pp=1",
    ),
    (
        "model=tiny model.config.model_type=gemma4_text model.config.hidden_size_per_layer_input=8 "
        "parallelism=pp2_1f1b",
        "parallelism.pp=2: the model computes inputs of each layer from the token ids (hidden_size_per_layer_input=8)",
    ),
    (
        "model=tiny model.config.model_type=gemma4_text model.config.hidden_size_per_layer_input=8 "
        "parallelism=fsdp2_tp2_sp",
        "which tp does not shard with the hidden states; set parallelism.sequence_parallel=false",
    ),
    ("parallelism.sequence_parallel=true", "parallelism.sequence_parallel=true: needs parallelism.tp > 1"),
    ("parallelism=single parallelism.pp=2", "parallelism.pp=2: strategy single has no such axis"),
]
AXES = [
    (
        "model=tiny parallelism=fsdp2_cp2 cluster=local_2proc training.seq_len=130",
        *("training.seq_len=130: must be a multiple of 4", "cp 2 splits a row into 4 chunks"),
    ),
    (
        "model=tiny parallelism=fsdp2_cp2 parallelism.tp=2 parallelism.sequence_parallel=true training.seq_len=130 "
        "cluster=local_4proc",
        *("training.seq_len=130: must be a multiple of 4", "sequence parallel splits it over tp 2"),
    ),
    (
        "model=tiny parallelism.cp=3 parallelism.cp_attention=ulysses training.seq_len=132",
        *("cp 3 cannot shard the 4 heads and 2 kv heads", "parallelism.cp_attention=all_gather"),
    ),
    ("parallelism=ddp parallelism.cp=2", "parallelism.cp=2: strategy ddp has no such axis"),
    ("parallelism=ddp parallelism.cp=2", "parallelism.cp=2: strategy ddp has no such"),
    (
        "model=tiny parallelism=pp2_1f1b parallelism.pp_schedule=Interleaved1F1B",
        *("parallelism.pp=2: Interleaved1F1B needs 4 stages", "the model has only 2 layers"),
    ),
    ("model=tiny parallelism.pp=4", "parallelism.pp=4: 1F1B needs 4 stages", "only 2 layers"),
    (
        "model=tiny parallelism=pp2_1f1b training.global_batch_size=1",
        *("leaves 1 micro-batches per step", "1F1B needs at least as many micro-batches as stages, 2"),
    ),
    (
        "model=smollm2_135m parallelism=pp2_1f1b parallelism.pp_schedule=DualPipeV training.global_batch_size=3",
        *("leaves 3 micro-batches per step", "DualPipeV needs at least as many micro-batches as stages, 4"),
    ),
    (
        "model=smollm2_135m parallelism=pp2_1f1b parallelism.pp_schedule=Interleaved1F1B training.global_batch_size=5",
        *("leaves 5 micro-batches per step", "runs 2 rounds over pp=2"),
    ),
    ("parallelism.pp_schedule=1f1b", "must be one of GPipe, 1F1B"),
    (
        "model=smollm2_135m parallelism=pp2_zbv model.compile=true",
        *("parallelism.pp_schedule=ZBVZeroBubble: splits the backward", "model.compile=false"),
    ),
    (
        "model=smollm2_135m model.loss=liger parallelism=tp3",
        *("model.loss=liger: liger-kernel needs the full vocabulary, but parallelism.tp=3", "model.loss=chunked"),
    ),
    (
        "model=smollm2_135m model.loss=liger parallelism=pp2_zbv",
        *("model.loss=liger: parallelism.pp_schedule=ZBVZeroBubble runs the backward twice", "model.loss=chunked"),
    ),
    (
        "model=smollm2_135m model.loss=liger evaluation.tasks=[a]",
        *("model.loss=liger: liger-kernel returns no log-probabilities", "model.loss=chunked, or evaluation.tasks=[]"),
    ),
    (
        "model.loss=liger cluster.device=cpu",
        *("model.loss=liger: liger-kernel only runs on GPUs, but cluster.device=cpu", "model.loss=chunked"),
    ),
    (
        "model=smollm2_135m parallelism.activation_checkpointing=selective model.compile=true",
        *("activation_checkpointing=selective: a compiled layer is recomputed as one unit", "model.compile=false"),
    ),
    (
        "model=smollm2_135m parallelism=pp2_zbv parallelism.activation_checkpointing=selective",
        *(
            "activation_checkpointing=selective: needs an unsplit backward",
            "pp_schedule=ZBVZeroBubble",
        ),
    ),
    ("parallelism=ddp parallelism.cpu_offload=true", "parallelism.cpu_offload=true: only fsdp2 can offload"),
    (
        "model=smollm2_135m parallelism=pp2_1f1b parallelism.cpu_offload=true",
        *("parallelism.cpu_offload=true: pipeline stages exchange", "set parallelism.pp=1, not 2"),
    ),
    (
        "parallelism=fsdp2_tp2 cluster=local_2proc parallelism.async_tp=true",
        *("parallelism.async_tp=true: overlaps", "set parallelism.sequence_parallel=true"),
    ),
    (
        "parallelism=fsdp2_tp2_sp cluster=local_2proc cluster.device=cpu parallelism.async_tp=true",
        *("parallelism.async_tp=true: needs the symmetric memory of GPUs", "cluster.device=cpu"),
    ),
    (
        "parallelism=fsdp2_tp2_sp cluster=local_2proc model.compile=false parallelism.async_tp=true",
        *("parallelism.async_tp=true: only compiled layers overlap", "model.compile=false", "set model.compile=true"),
    ),
    (
        "parallelism.defer_grad_sync=sometimes",
        *("parallelism.defer_grad_sync=sometimes: must be", "true, false or auto"),
    ),
    (
        "parallelism=ddp parallelism.reshard_after_forward=false",
        *("parallelism.reshard_after_forward=false: only fsdp2", "parallelism.strategy=ddp"),
    ),
    (
        "parallelism=ddp parallelism.prefetch=2",
        *("parallelism.prefetch=2: only fsdp2 gathers parameters", "parallelism.strategy=ddp"),
    ),
    ("parallelism.prefetch=-1", "parallelism.prefetch=-1: must be at least 0"),
    ("logging.peak_tflops=0", "logging.peak_tflops=0", "must be greater than 0"),
    ("logging.profile.enabled=true logging.profile.ranks=[]", "logging.profile.ranks=[]: no rank would record"),
    (
        "logging.profile.enabled=true logging.profile.ranks=[0,7]",
        "rank 7 does not exist, ranks are 0 to ",
        "change logging.profile.ranks",
    ),
    (
        "logging.profile.enabled=true training.max_steps=11",
        *(
            "logging.profile.start=10: the trace of 3 steps ends with step 12, after training.max_steps=11",
            "profile.start",
            "profile.steps",
        ),
    ),
    (
        "optimizer.decay_steps=20 optimizer.schedule=wsd training.max_steps=20",
        "optimizer.decay_steps=20: must fit, after optimizer.warmup_steps=",
        "into training.max_steps=20; set it to at most 1",
    ),
    ("logging.profile.start=0", "logging.profile.start=0: must be at least 1"),
    ("training.gc_every=-1", "training.gc_every=-1: must be at least 0"),
    ("model.loss=fused", "model.loss=fused", "must be one of auto, logits, chunked, liger"),
    ("parallelism.stages_per_rank=1", "parallelism.stages_per_rank=1: must be at least 2"),
    ("parallelism.cp_attention=ring", "parallelism.cp_attention=ring", "must be one of auto, ulysses, all_gather"),
]
EXPERTS = [
    ("model=tiny parallelism=fsdp2_ep2", "parallelism.ep=2: the model is dense", "parallelism.ep=1"),
    ("model=smollm2_135m parallelism=fsdp2_ep2", "parallelism.ep=2: the model is dense", "parallelism.ep=1"),
    (
        "model=tiny_moe parallelism.ep=3 training.global_batch_size=12",
        "parallelism.ep=3: does not divide the model's 8 experts",
    ),
    ("model=tiny_moe parallelism=fsdp2_ep4 model.config.num_experts=6", "parallelism.ep=4", "6 experts"),
    ("model=tiny_moe parallelism=ddp parallelism.ep=2", "parallelism.ep=2: strategy ddp has no such axis"),
    ("model=tiny_moe parallelism=ddp parallelism.ep=2", "parallelism.ep=2", "parallelism.strategy=fsdp2"),
    ("model=tiny_moe parallelism=fsdp2_ep2 cluster.procs_per_node=3", "3 processes cannot be divided by ep 2 = 2"),
]
PEFT = [
    ("peft=qlor", "peft=qlor: no such option", "did you mean qlora?"),
    ("peft=lora peft.method=loha", "peft.method=loha: must be one of none, lora, qlora"),
    ("peft.rank=8", "peft.rank=8: peft.method=none trains every parameter", "add peft=lora"),
    ("peft=lora peft.r=8", "peft.r=8: no such key"),
    ("peft=lora peft.rank=0", "peft.rank=0: must be at least 1"),
    ("peft=lora peft.alpha=0", "peft.alpha=0.0: must be greater than 0"),
    ("peft=lora peft.dropout=1", "peft.dropout=1.0: must be at least 0 and less than 1"),
    ("peft=lora peft.targets=[]", "peft.targets=[]: name at least one layer, or all-linear"),
    ("peft=lora peft.targets=[all-linear,q_proj]", "all-linear cannot be combined with names; remove either"),
    (
        "peft=dora peft.target_parameters=[experts.down_proj]",
        "peft.dora=true: is not defined for peft.target_parameters",
    ),
    ("peft=lora peft.dropout=0.1 peft.target_parameters=[experts.down_proj]", "peft.dropout=0.1", "set peft.dropout=0"),
    ("peft.target_parameters=[experts.down_proj]", "peft.target_parameters=", "add peft=lora"),
    ("peft=lora peft.export=gguf", "peft.export=gguf: must be one of adapter, merged, both"),
]
KERNELS = [
    ("model.attention=flash", "model.attention=flash: must be one of sdpa, sdpa_flash, eager, "),
    ("model.float8_bound=0", "model.float8_bound=0.0: must be greater than"),
]
UNEVEN_HEADS = [
    (
        "model=smollm2_135m_hub parallelism=tp2 parallelism.uneven_heads=refuse",
        *("parallelism.tp=2", "9 attention heads and 3 kv heads", "parallelism.uneven_heads=replicate"),
    ),
    (
        "model=qwen3_0_6b parallelism=tp3 parallelism.uneven_heads=refuse",
        *("parallelism.tp=3", "16 attention heads and 8 kv heads"),
    ),
    (
        "model=tiny model.config.num_attention_heads=6 parallelism=tp4 parallelism.uneven_heads=refuse",
        *("parallelism.tp=4", "6 attention heads and 2 kv heads"),
    ),
]
SLURM = [
    ("cluster.kind=slurm", "cluster.procs_per_node=auto: auto is for local runs"),
    ("cluster=slurm_1node cluster.device=cpu cluster.time=soon", "cluster.time='soon': is not a time limit", "D-H:M:S"),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.time=5",
        "cluster.signal_lead_seconds=300",
        "lower the lead, or raise cluster.time",
    ),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.signal_lead_seconds=0",
        "cluster.signal_lead_seconds=0: must be at least 1",
    ),
    ("cluster=slurm_1node cluster.device=cpu cluster.cpus_per_proc=0", "cluster.cpus_per_proc=0: must be at least 1"),
    ("cluster=slurm_1node cluster.device=cpu cluster.mem=2$G", "cluster.mem='2$G': is not a valid Slurm mem"),
    ("cluster=slurm_1node cluster.device=cpu cluster.requeue.max=-1", "cluster.requeue.max=-1: must be at least 0"),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.requeue.maxx=1",
        "no such key",
        "did you mean cluster.requeue.max?",
    ),
    ("cluster=slurm_1node cluster.device=cpu cluster.launcher=mpirun", "must be one of srun, torchrun", "did you mean"),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.gpu_request=gpus",
        "must be one of gpus_per_node, gres, gpus_per_task, none",
    ),
    (
        "cluster=slurm_8node cluster.device=cpu cluster.nodes=8-4",
        "cluster.nodes=8-4: must be a number of nodes, 1 or more, or a range such as 4-8",
    ),
    ("cluster=k8s_8node cluster.nodes=4-8", "cluster.nodes=4-8: a job on Kubernetes has a fixed number of pods"),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.container.runtime=docker",
        "must be one of none, pyxis, apptainer",
    ),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.container.runtime=pyxis",
        "needs an image; set cluster.container.image",
    ),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.container.image=x.sif",
        "cluster.container.runtime=none: no container is used",
    ),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.sbatch_extra.nodes=3",
        "cluster.sbatch_extra.nodes=3: is set by cluster.nodes",
    ),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.sbatch_extra.N=3",
        "cluster.sbatch_extra.N='3': must be a long option of sbatch",
    ),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.srun_extra=[cores]",
        "cluster.srun_extra: 'cores' must begin with a dash",
    ),
    ("cluster=slurm_1node cluster.device=cpu cluster.setup=date", "cluster.setup=date: must be a list"),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.env.status=x",
        "cluster.env.status: is reserved by the batch script",
    ),
    ("cluster=slurm_1node cluster.device=cpu cluster.env.9=x", "cluster.env.9: is not a valid variable name"),
    (
        "cluster=slurm_1node cluster.device=cpu cluster.env.A=???",
        "cluster.env.A=???: '???' marks a missing value",
    ),
]
KUBERNETES = [
    ("cluster=k8s cluster.procs_per_node=auto", "cluster.procs_per_node=auto: auto is for local runs"),
    (
        "cluster=k8s cluster.k8s.volumes.runs=/runs",
        "cluster.k8s.image=null: the pods need an image",
        "conf/local/user.yaml",
    ),
    ("cluster=k8s cluster.k8s.image=a", "cluster.k8s.volumes={}: the run directory must be on a volume"),
    (
        "cluster=k8s cluster.k8s.image=a cluster.k8s.volumes.runs=/nowhere",
        "is on no volume of cluster.k8s.volumes (mounted at /nowhere)",
    ),
    ("cluster=k8s cluster.k8s.image=Me/Meshbook:1", "is not a valid image name; did you mean me/meshbook:1?"),
    ("cluster=k8s cluster.k8s.namespace=My_Team", "cluster.k8s.namespace='My_Team': is not a valid name"),
    ("cluster=k8s cluster.k8s.volumes.runs=runs", "cluster.k8s.volumes.runs='runs': must be an absolute path"),
    ("cluster=k8s cluster.k8s.shm_size=64GB", "cluster.k8s.shm_size='64GB': is not a Kubernetes quantity"),
    ("cluster=k8s cluster.k8s.tolerations=[a:Never]", "'a:Never' is not KEY[=VALUE][:EFFECT]", "NoSchedule"),
    ("cluster=k8s cluster.k8s.workload=pod", "must be one of job, jobset"),
    ("cluster=k8s cluster.env.MESHBOOK_JOB=x", "cluster.env.MESHBOOK_JOB: is set for each rank by its pod"),
    ("cluster=k8s cluster.k8s.imge=x", "cluster.k8s.imge=x: no such key; did you mean cluster.k8s.image?"),
]
TWO_SOURCES = "data=mixture +data@data.sources.maths=gsm8k +data@data.sources.docs=pydocs"
MIXTURES = [
    ("data=mixture", "data.sources={}: a mixture needs sources", "+data@data.sources.NAME=OPTION"),
    (f"{TWO_SOURCES} data.sources.maths.weight=0", "data.sources.maths.weight=0.0: must be a number greater than 0"),
    (
        f"{TWO_SOURCES} data.sources.maths.wieght=2",
        "data.sources.maths.wieght=2: no such key; did you mean data.sources.maths.weight?",
    ),
    (
        f"{TWO_SOURCES} data.sources.math.weight=2",
        "data.sources.math.weight=2: the mixture has no source math; did you mean maths?",
    ),
    (
        f"{TWO_SOURCES} data.sources.web.weight=2",
        "data.sources.web.weight=2: the mixture has no source web; add it: +data@data.sources.web=OPTION",
    ),
    (f"{TWO_SOURCES} data.path=x", "data.path=x: must be set per source of a mixture; set data.sources.NAME.path"),
    (f"{TWO_SOURCES} data.max_samples=9", "data.max_samples=9", "set data.sources.NAME.max_samples"),
    (
        f"{TWO_SOURCES} data.sources.maths.eval_split=null data.sources.maths.eval_fraction=0 "
        "data.sources.docs.eval_split=null data.sources.docs.eval_fraction=0",
        *("data.sources: maths, docs have eval_fraction=0", "set data.sources.NAME.eval_fraction of one above 0"),
    ),
    ("data.weight=2", "data.weight=2.0: only sources of a mixture have weights; remove it"),
    (
        f"{TWO_SOURCES} data.sources.docs.cache=x",
        "data.sources.docs.cache=x: all sources share the cache of the mixture; set data.cache instead",
    ),
    (
        f"{TWO_SOURCES} +data@data.sources.code=pysource",
        "data.sources.code.pack=true: either all sources are packed or none",
    ),
    (
        f"{TWO_SOURCES} +data@data.sources.mine=jsonl data.sources.mine.path=no.csv",
        *("data.sources.mine.path=no.csv: no such file or folder", "set data.sources.mine.path"),
    ),
    (f"{TWO_SOURCES} +data@data.sources.more=mixture", "data.sources.more.kind=mixture: a mixture cannot be a source"),
    ("data=mixture data@data.sources.x=gsm8k", "write it with a plus: +data@data.sources.x=gsm8k"),
    ("+data@data.sources.x=gsm8k", "data.sources: only a mixture has sources; add data=mixture"),
    ("data.sources.x.weight=2", "data.sources.x.weight=2: only a mixture has sources; add data=mixture"),
]
BATCH = [
    (
        "training.batch_size_ramp=[{until_step:5,global_batch_size:5}] cluster=local_2proc",
        *("training.batch_size_ramp[0].global_batch_size=5: must be a multiple of dp=2", ".global_batch_size=6, or"),
    ),
    (
        "training.batch_size_ramp=[{until_step:5,global_batch_size:16}]",
        "global_batch_size must be at least 1 and increase from stage to stage, up to training.global_batch_size=16",
    ),
    (
        "training.batch_size_ramp=[{until_step:50,global_batch_size:8}]",
        "the last until_step must be less than training.max_steps=40; change either",
    ),
    (
        "data=pysource training.seq_len_ramp=[{until_step:5,seq_len:100}]",
        "training.seq_len_ramp[0].seq_len=100: must divide training.seq_len=256",
    ),
    ("training.seq_len_ramp=[{until_step:5,seq_len:64}]", "separate answers from their prompts under data.kind=docs"),
    (
        "training.seq_len_ramp=[{until_step:5,seq_len:512}]",
        "seq_len must be at least 2 and increase from stage to stage, up to training.seq_len=256",
    ),
    (
        "data=pysource training.seq_len_ramp=[{until_step:5,seq_len:2}] parallelism.cp=2 cluster=local_2proc",
        "training.seq_len_ramp[0].seq_len=2: must be a multiple of 4, because cp 2 splits a row into 4 chunks",
    ),
    ("training.batch_size_ramp=[{until:5,global_batch_size:8}]", "every stage needs until_step and global_batch_size"),
    (
        "training.batch_size_ramp=[{until_step:5,global_batch_size:4},{until_step:5,global_batch_size:8}]",
        "until_step must be at least 1 and increase from stage to stage",
    ),
    (
        "training.global_batch_size=7 cluster=local_2proc",
        *("training.global_batch_size=7: must be a multiple of dp=2", "set training.global_batch_size=8, or"),
    ),
    (
        "parallelism=fsdp2_tp2 cluster.procs_per_node=8 training.global_batch_size=18",
        *("training.global_batch_size=18: must be a multiple of dp=4", "=20", "parallelism.dp_shard"),
    ),
]
NOT_BUILT = [
    ("training.max_steps=10,20", "training.max_steps=10,20: is a sweep over several values; add -m, set one value, or"),
    ("parallelism=ddp,fsdp2", "parallelism=ddp,fsdp2: is a sweep over several values; add -m, set one value, or"),
]
SWEEPS = [
    ("-m", "a sweep needs a key with several values, such as parallelism=ddp,fsdp2", "or remove -m"),
    ("-m training.max_steps=3", "a sweep needs a key with several values", "or remove -m"),
    ("--multirun parallelism=fsdp2", "a sweep needs a key with several values"),
    ("-m cluster.dry_run=true", "a sweep needs a key with several values"),
    ("-m parallelism=ddp,fsdp2 training.max_step=3", "training.max_step=3: no such key", "training.max_steps"),
    ("-m parallelism=ddp,fspd2", "parallelism=fspd2: no such option; did you mean fsdp2?"),
    ("-m trainig.max_steps=1,2", "trainig.max_steps=1,2: no such key; did you mean training.max_steps?"),
    ("-m training.max_steps=1,two", "training.max_steps=two", "must be a whole number"),
    ("-m parallelism=ddp,,fsdp2", "parallelism=ddp,,fsdp2: cannot be parsed"),
    ("-m optimizer.lr=interval(0,1)", "optimizer.lr=interval(0,1)", "range(START,STOP,STEP)"),
    ("-m run.seed=range(1,9,0)", "run.seed=range(1,9,0)", "a step of 0"),
    ("-m parallelism=glob(zzz*)", "parallelism=glob(zzz*): matches no option", "fsdp2_tp2"),
    ("-m run.seed=glob(*)", "run.seed=glob(*)", "only config groups have options"),
    ("-m run.dir=a,b", "run.dir=a,b", "the folder of the whole sweep"),
    ("-m run.seed=1,2 run.seed=3", "run.seed=1,2: run.seed is set 2 times"),
    (
        "-m data=mixture +data@data.sources.a=pydocs,gsm8k +data@data.sources.a=pydocs",
        "+data@data.sources.a=pydocs,gsm8k: data@data.sources.a is set 2 times; set it once",
    ),
    ("optimizer.lr=log(1e-5,1e-3,5)", "optimizer.lr=log(1e-5,1e-3,5): is a sweep over several values; add -m"),
    (
        "-m optimizer.lr=log(0,1,3)",
        "optimizer.lr=log(0,1,3): write log(FIRST,LAST,COUNT) with two different numbers greater",
    ),
    (
        "-m optimizer.lr=lin(1,2)",
        "optimizer.lr=lin(1,2): write lin(FIRST,LAST,COUNT) with two different numbers and 2 to",
    ),
    ("-m optimizer.lr=uniform(2,1) sweep.draws=3", "optimizer.lr=uniform(2,1): write uniform(LOW,HIGH)", "LOW less"),
    ("-m optimizer.lr=uniform(1,nan) sweep.draws=3", "optimizer.lr=uniform(1,nan): write uniform(LOW,HIGH)"),
    (
        "-m optimizer.lr=loguniform(1e-5,1e-3)",
        "optimizer.lr=loguniform(1e-5,1e-3): is drawn at random; add sweep.draws=N",
    ),
    (
        "-m run.seed=1,2 sweep.draws=3",
        "sweep.draws=3: the swept keys have only 2 combinations; remove it to run them all",
    ),
    ("-m run.seed=1,2 sweep.draws=1", "sweep.draws=1: must be at least 2"),
    ("-m run.seed=1,2 sweep.trials=1", "sweep.trials=1: must be at least 2"),
    ("-m run.seed=1,2 sweep.trials=3", "sweep.trials=3: the swept keys have only 2 combinations"),
    (
        "-m optimizer.lr=uniform(1,2) sweep.trials=3 sweep.draws=4",
        "sweep.trials=3: the study chooses the points; remove sweep.draws=4, or sweep.trials",
    ),
    ("-m optimizer.lr=-1 run.seed=1,2,3 sweep.trials=3", "optimizer.lr=-1.0: must be greater than 0"),
    ("-m run.seed=1,2 sweep.early_stop=worst", "sweep.early_stop=worst: must be one of median"),
    (
        "-m run.seed=1,2 sweep.early_stop=median training.max_steps=20 training.eval_every=20",
        "training.eval_every=20: sweep.early_stop=median compares eval_loss during the runs; set it to a number",
    ),
    ("-m run.seed=1,2 sweep.parallel=0", "sweep.parallel=0: must be at least 1"),
    (
        "-m run.seed=1,2 sweep.parallel=99 cluster=local_2proc",
        "sweep.parallel=99: 99 points of 2 processes are 198 on this machine; the limit is",
    ),
    ("sweep.metric=mfu", "sweep.metric=mfu: is a key of a sweep, not of a run; add -m and a key with several values"),
    ("-m run.seed=1,2 sweep.metrics=mfu", "sweep.metrics=mfu: no such key; did you mean sweep.metric?"),
    ("-m run.seed=1,2 sweep.metric=mfu,loss", "sweep.metric=mfu,loss: is a key of the sweep itself; set one value"),
    ("-m run.seed=1,2 sweep.goal=up", "sweep.goal=up: must be one of min, max"),
    ("-m run.seed=1,2 sweep.metric=bleu", "sweep.metric=bleu: ", "add sweep.goal=min or max"),
    ("-m run.seed=1,2 sweep.goal=max", "sweep.goal=max: a lower eval_loss is better"),
    ("-m run.dir=/dev/null/sweep run.seed=1,2 cluster.dry_run=true", "run.dir=/dev/null/sweep: cannot be used"),
    ("-m run.dir=/dev/null/sweep run.seed=1,2", "run.dir=/dev/null/sweep: cannot be used"),
    ("-m parallelism=tp3 run.seed=1,2 cluster=local_2proc", "tp 3 = 3 processes, but there are 2"),
]
SYNTAX = [
    ("training.max_steps", "training.max_steps: cannot be parsed", "KEY=VALUE"),
    ("run.name=a=b", "run.name=a=b: cannot be parsed", "quote"),
    ("run.name=${nowhere}", "run.name", "nowhere", "${...}"),
    ("data=jsonl data.path=~/x.jsonl", "~ is not expanded here; write data.path=$HOME/x.jsonl", "'data.path=\"~/..."),
    ("-m run.dir=~/a,~/b", "~ is not expanded here; write run.dir=$HOME/a,$HOME/b, or quote it"),
    ("hydra.run.dir=x", "hydra.run.dir=x", "Hydra is only used for composition"),
    ("=3", "=3: key missing"),
    ("--config-dir nowhere", "--config-dir=nowhere: no such folder"),
]
PLACES = [
    ("run.resume=nowhere", "run.resume=nowhere: no such checkpoint"),
    ("run.resume=''", "run.resume=''", "auto, never"),
    ("run.dir=/dev/null/run", "run.dir=/dev/null/run: cannot be used", "choose another run.dir"),
    ("cluster.dry_run=true run.dir=/dev/null/run", "run.dir=/dev/null/run: cannot be used: File exists"),
    (
        "cluster.dry_run=true run.resume=/",
        "run.resume=/: no such checkpoint",
        "set it to auto, never or RUN/checkpoints/step_N",
    ),
    ("cluster.device=cuda", "cluster.device=cuda: no GPU is visible"),
]
TABLE = {
    "unknown_key": UNKNOWN_KEY,
    "wrong_type": WRONG_TYPE,
    "wrong_choice": WRONG_CHOICE,
    "misspelt_group_or_option": MISSPELT_GROUP_OR_OPTION,
    "missing_value": MISSING_VALUE,
    "out_of_range": OUT_OF_RANGE,
    "mesh": MESH,
    "axes": AXES,
    "experts": EXPERTS,
    "peft": PEFT,
    "kernels": KERNELS,
    "uneven_heads": UNEVEN_HEADS,
    "slurm": SLURM,
    "kubernetes": KUBERNETES,
    "mixtures": MIXTURES,
    "batch": BATCH,
    "not_built": NOT_BUILT,
    "sweeps": SWEEPS,
    "syntax": SYNTAX,
    "places": PLACES,
}
