"""Names of this schema's keys in other tools: Trainer, TRL, PEFT, torchrun, DeepSpeed, Megatron, axolotl."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

_NAMES = {
    "optimizer.lr": "learning_rate peak_lr max_lr base_lr lr",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay_style",
    "optimizer.warmup_steps": "warmup warmup_ratio num_warmup_steps lr_warmup_steps lr_warmup_iters",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "optimizer.eps": "adam_epsilon epsilon adam_eps",
    "optimizer.weight_decay": "wd decay",
    "optimizer.min_lr_ratio": "min_lr min_learning_rate",
    "training.epochs": "epoch num_epochs num_train_epochs n_epochs max_epochs epochs",
    "training.max_steps": "steps num_steps train_steps train_iters max_iters total_steps iterations",
    "training.global_batch_size": "batch_size train_batch_size total_batch_size effective_batch_size bs "
    "gradient_accumulation_steps gradient_accumulation grad_accum accumulation_steps",
    "evaluation.micro_batch_size": "per_device_eval_batch_size eval_batch_size batch_size",
    "training.micro_batch_size": "per_device_train_batch_size per_device_batch_size micro_batch device_batch_size "
    "train_micro_batch_size_per_gpu per_device_eval_batch_size eval_batch_size",
    "training.seq_len": "max_seq_length max_seq_len max_length seq_length sequence_length sequence_len block_size "
    "context_length cutoff_len model_max_length",
    "evaluation.seq_len": "max_seq_length max_seq_len max_length seq_length sequence_length block_size",
    "training.log_every": "logging_steps log_steps log_interval logging_strategy",
    "training.eval_every": "eval_steps eval_interval evaluation_steps eval_strategy evaluation_strategy",
    "training.max_grad_norm": "grad_clip gradient_clipping clip_grad clip_grad_norm gradient_clip_val",
    "checkpoint.every": "save_steps save_interval save_every checkpoint_interval save_strategy",
    "checkpoint.keep": "save_total_limit keep_last max_checkpoints",
    "run.resume": "resume_from_checkpoint resume_from load_checkpoint",
    "run.seed": "random_seed manual_seed",
    "run.deterministic": "deterministic full_determinism use_deterministic_algorithms",
    "run.dir": "output_dir out_dir save_dir output_path log_dir logging_dir",
    "run.name": "run_name experiment_name job_name exp_name",
    "model.path": "model_name_or_path model_name model_id base_model pretrained_model_name_or_path checkpoint_path",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "model.attention": "attn_implementation attn_impl",
    "model.attention=sdpa": "use_flash_attention flash_attention flash_attn",
    "model.dtype": "torch_dtype param_dtype",
    "model.compute_dtype=bfloat16": "bf16 bfloat16 amp mixed_precision use_bf16 fp16 half",
    "model.compute_dtype": "precision",
    "model.qat": "qat quantizer qat_config",
    "model.compile": "torch_compile use_compile",
    "data.path": "dataset dataset_name dataset_path train_file data_path data_files train_data",
    "data.eval_path": "eval_file validation_file eval_dataset valid_file test_file",
    "data.max_samples": "max_train_samples num_samples train_samples",
    "data.max_eval_samples": "num_eval_samples eval_samples",
    "data.pack": "packing sample_packing use_packing",
    "data.eval_fraction": "val_set_size validation_split test_size val_fraction",
    "data.text_column": "text_field dataset_text_field",
    "peft.rank": "lora_r lora_rank r lora_dim",
    "peft.alpha": "lora_alpha",
    "peft.dropout": "lora_dropout",
    "peft.targets": "target_modules lora_target_modules lora_target lora_targets",
    "peft.target_parameters": "lora_target_parameters",
    "peft.rslora": "use_rslora",
    "peft.dora": "use_dora",
    "peft=lora": "use_peft use_lora lora adapter",
    "peft=qlora": "load_in_4bit qlora use_qlora quantize_4bit",
    "parallelism.activation_checkpointing=full": "gradient_checkpointing recompute remat use_gradient_checkpointing",
    "parallelism.activation_checkpointing": "recompute_granularity",
    "parallelism.activation_offload": "activation_offloading offload_activations",
    "parallelism.tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size "
    "tp_degree",
    "parallelism.pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
    "pipeline_model_parallel_size pp_size",
    "parallelism.cp": "context_parallel context_parallel_size context_parallel_degree cp_size sequence_parallel_size",
    "parallelism.ep": "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "parallelism.dp_shard": "data_parallel_shard_degree fsdp_size",
    "parallelism.dp_replicate": "data_parallel_replicate_degree data_parallel_size dp_size ddp_size",
    "parallelism=fsdp2": "fsdp fsdp_config deepspeed zero_stage distributed_strategy",
    "parallelism=ddp": "ddp",
    "cluster.procs_per_node": "num_gpus gpus n_gpus ngpus num_processes nproc_per_node nproc gpus_per_node devices "
    "world_size tasks_per_node",
    "cluster.nodes": "num_nodes nnodes n_nodes num_machines",
    "cluster.time": "walltime time_limit",
    "logging.wandb.mode=online": "report_to wandb use_wandb",
    "logging.wandb.mode": "wandb_mode",
    "logging.wandb.project": "wandb_project project project_name",
    "logging.tensorboard": "tensorboard use_tensorboard",
    "logging.mlflow.enabled": "mlflow use_mlflow",
    "logging.mlflow.project": "mlflow_experiment_name mlflow_experiment",
    "logging.trackio.enabled": "trackio use_trackio",
    "generation.max_new_tokens": "max_tokens",
}
_NOTES = {
    "warmup_ratio": "It counts optimizer steps: {value} * training.max_steps",
    "warmup num_warmup_steps lr_warmup_steps lr_warmup_iters logging_steps log_steps log_interval logging_strategy "
    "eval_steps eval_interval evaluation_steps eval_strategy evaluation_strategy save_steps save_interval save_every "
    "checkpoint_interval save_strategy": "It counts optimizer steps",
    "adam_beta1 adam_beta2 beta1 beta2": "It is a list of both, [BETA1,BETA2]",
    "min_lr min_learning_rate": "It is a share of optimizer.lr: {value} / optimizer.lr",
    "batch_size train_batch_size total_batch_size effective_batch_size bs": "It counts the sequences of an optimizer "
    "step over all ranks",
    "gradient_accumulation_steps gradient_accumulation grad_accum accumulation_steps": "It counts the sequences of an "
    "optimizer step over all ranks: {value} * training.micro_batch_size * data-parallel ranks",
    "per_device_train_batch_size per_device_batch_size micro_batch device_batch_size train_micro_batch_size_per_gpu "
    "per_device_eval_batch_size eval_batch_size": "It counts the sequences of a forward pass of one rank, "
    "training.global_batch_size those of an optimizer step over all ranks",
    "max_seq_length max_seq_len max_length seq_length sequence_length sequence_len block_size context_length "
    "cutoff_len model_max_length": "It counts tokens",
    "num_gpus gpus n_gpus ngpus num_processes nproc devices world_size": "It counts the processes of one node",
    "walltime time_limit": "It is for cluster=slurm, and a time in Slurm's notation, such as 24:00:00",
    "val_set_size validation_split test_size val_fraction": "It is a share in [0, 1)",
    "resume_from_checkpoint resume_from load_checkpoint": "It is auto, never or the path of a checkpoint",
    "use_flash_attention flash_attention flash_attn": "It uses flash kernels on GPUs",
    "fp16 half": "float16 is not supported",
    "report_to": "Others are logging.tensorboard=true, logging.mlflow.enabled=true and logging.trackio.enabled=true",
    "max_train_samples num_samples train_samples num_eval_samples eval_samples": "It counts rows of the source",
    "dataset dataset_name dataset_path train_file data_path data_files train_data eval_file validation_file "
    "eval_dataset valid_file test_file": "It needs data=jsonl, or another option of data that has it",
    "text_field dataset_text_field": "It needs data=text or data=pysource",
    "lora_r lora_rank r lora_dim lora_alpha lora_dropout use_rslora use_dora lora_target_parameters": "It needs "
    "peft=lora",
    "target_modules lora_target_modules lora_target lora_targets": "It needs peft=lora, and is a list, such as "
    "[q_proj,v_proj]",
}
"""Names in other tools -> unit of this schema's key, or what else it needs."""
_KEYS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        name: tuple(key for key, names in _NAMES.items() if name in names.split())
        for name in " ".join(_NAMES.values()).split()
    }
)


def note_on(name: str, value: object) -> str:
    """Return how the key that other tools call `name` differs from it, as a sentence after the key; or ''."""
    same = name.lower().replace("-", "_")
    note = next((note for names, note in _NOTES.items() if same in names.split()), None)
    return f" {note.format(value=value)}" if note else ""


def synonym_of(name: str, keys: Collection[str]) -> str | None:
    """Return the key, or the setting (peft=lora), that other tools call `name` and whose key is in `keys`; or None."""
    candidates = _KEYS_OF.get(name.lower().replace("-", "_"), ())
    return next((key for key in candidates if key.partition("=")[0] in keys), None)
