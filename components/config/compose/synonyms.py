"""Names of this schema's keys in other tools: Trainer, TRL, PEFT, torchrun, DeepSpeed, Megatron, axolotl."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

_NAMES = {
    "optimizer.lr": "learning_rate peak_lr max_lr base_lr lr",
    "optimizer.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule lr_decay_style",
    "optimizer.warmup_steps": "warmup warmup_ratio num_warmup_steps lr_warmup_steps lr_warmup_iters",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2 adam_betas",
    "optimizer.eps": "adam_epsilon epsilon adam_eps",
    "optimizer.weight_decay": "wd decay",
    "optimizer.min_lr_ratio": "min_lr min_learning_rate",
    "training.epochs": "epoch num_epochs num_train_epochs n_epochs max_epochs epochs",
    "training.max_steps": "steps num_steps train_steps train_iters max_iters total_steps iterations "
    "max_steps_per_epoch",
    "training.global_batch_size": "batch_size train_batch_size total_batch_size effective_batch_size bs "
    "gradient_accumulation_steps gradient_accumulation grad_accum accumulation_steps",
    "evaluation.micro_batch_size": "per_device_eval_batch_size eval_batch_size batch_size",
    "training.micro_batch_size": "per_device_train_batch_size per_device_batch_size micro_batch device_batch_size "
    "train_micro_batch_size_per_gpu per_device_eval_batch_size eval_batch_size",
    "training.seq_len": "max_seq_length max_seq_len max_length seq_length sequence_length sequence_len block_size "
    "context_length cutoff_len model_max_length max_prompt_length max_completion_length",
    "evaluation.seq_len": "max_seq_length max_seq_len max_length seq_length sequence_length block_size",
    "training.log_every": "logging_steps log_steps log_interval logging_strategy log_every_n_steps",
    "training.eval_every": "eval_steps eval_interval evaluation_steps eval_strategy evaluation_strategy "
    "evals_per_epoch run_val_every_n_steps",
    "training.max_grad_norm": "grad_clip gradient_clipping clip_grad clip_grad_norm gradient_clip_val",
    "training.neftune_alpha": "neftune_noise_alpha neftune_alpha noise_alpha",
    "checkpoint.every": "save_steps save_interval save_every checkpoint_interval save_strategy saves_per_epoch",
    "checkpoint.keep": "save_total_limit keep_last max_checkpoints",
    "run.resume": "resume_from_checkpoint resume_from load_checkpoint",
    "run.seed": "random_seed manual_seed",
    "run.deterministic": "deterministic full_determinism use_deterministic_algorithms",
    "run.dir": "output_dir out_dir save_dir output_path log_dir logging_dir",
    "run.name": "run_name experiment_name job_name exp_name",
    "model.path": "model_name_or_path model_name model_id base_model pretrained_model_name_or_path checkpoint_path "
    "checkpoint_dir model_id_or_path",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer.path",
    "model.attention": "attn_implementation attn_impl",
    "model.attention=sdpa": "use_flash_attention flash_attention flash_attn",
    "model.dtype": "torch_dtype param_dtype",
    "model.compute_dtype=bfloat16": "bf16 bfloat16 amp mixed_precision use_bf16 fp16 half",
    "model.compute_dtype": "precision",
    "model.qat": "qat quantizer qat_config",
    "model.compile": "torch_compile use_compile",
    "data.path": "dataset dataset_name dataset_path train_file data_path data_files train_data dataset.source "
    "dataset.data_files dataset_dir datasets",
    "data.eval_path": "eval_file validation_file eval_dataset valid_file test_file",
    "data.max_samples": "max_train_samples num_samples train_samples",
    "data.max_eval_samples": "num_eval_samples eval_samples",
    "data.pack": "packing sample_packing use_packing group_by_length",
    "data.eval_fraction": "val_set_size validation_split test_size val_fraction",
    "data.text_column": "text_field dataset_text_field",
    "data.overlong": "truncation_mode truncation_strategy truncation_side excess_length_strategy",
    "data.train_on=last": "mask_history last_response_only",
    "data.train_on": "masking_strategy loss_scale roles_to_train",
    "model.new_tokens": "add_tokens special_tokens add_special_tokens additional_special_tokens added_tokens tokens "
    "new_special_tokens resize_vocab",
    "peft.path": "lora_model_dir adapter_path adapter_name_or_path resume_from_adapter",
    "peft.modules_to_save": "modules_to_save lora_modules_to_save additional_target",
    "training.trainable": "unfrozen_parameters trainable_parameters trainable_params freeze_trainable_layers "
    "freeze_trainable_modules",
    "training.freeze": "freeze_parameters freeze_modules frozen_parameters freeze_layers",
    "optimizer.groups": "param_groups lr_groups embedding_lr embedding_learning_rate loraplus_lr_ratio",
    "peft.rank": "lora_r lora_rank r lora_dim",
    "peft.alpha": "lora_alpha",
    "peft.dropout": "lora_dropout",
    "peft.targets": "target_modules lora_target_modules lora_target lora_targets lora_target_linear lora_attn_modules",
    "peft.target_parameters": "lora_target_parameters",
    "peft.rslora": "use_rslora",
    "peft.dora": "use_dora",
    "peft=lora": "use_peft use_lora lora",
    "peft=qlora": "load_in_4bit qlora use_qlora quantize_4bit load_in_8bit quantization_bit quant_bits",
    "parallelism.activation_checkpointing=full": "gradient_checkpointing recompute remat "
    "use_gradient_checkpointing enable_activation_checkpointing",
    "parallelism.activation_checkpointing": "recompute_granularity",
    "parallelism.activation_offload": "activation_offloading offload_activations enable_activation_offloading",
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
    "logging.wandb.mode=online": "report_to wandb use_wandb metric_logger",
    "logging.wandb.mode": "wandb_mode",
    "logging.wandb.project": "wandb_project project project_name",
    "logging.tensorboard": "tensorboard use_tensorboard",
    "logging.mlflow.enabled": "mlflow use_mlflow",
    "logging.mlflow.project": "mlflow_experiment_name mlflow_experiment",
    "logging.trackio.enabled": "trackio use_trackio",
    "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model save_best",
    "model.loss=liger": "use_liger_kernel use_liger enable_liger_kernel",
    "data.cache": "dataset_prepared_path",
    "model.chat_template": "template chat_template chat_template_path chat_template_jinja",
    "peft.export": "save_adapter_weights_only save_only_model",
    "data.system_prompt": "system default_system",
    "objective.loss": "loss_type pref_loss rl_loss",
    "rollouts.group": "num_generations n_samples_per_prompt group_size",
    "rollouts.max_new_tokens": "max_completion_length max_response_length response_length",
    "rollouts.temperature": "temperature sampling_temperature",
    "rollouts.batches": "steps_per_generation",
    "rollouts.passes": "num_iterations ppo_epochs",
    "rollouts.overlong=mask": "mask_truncated_completions overlong_filter",
    "reward.functions": "reward_funcs reward_functions reward_fn reward_func",
    "reward.weights": "reward_weights",
    "objective.clip_low": "epsilon epsilon_low clip_ratio_low clip_range",
    "objective.clip_high": "epsilon_high clip_ratio_high",
    "objective.scale": "scale_rewards",
    "objective.beta": "pref_beta rl_beta dpo_beta",
    "objective.gamma": "simpo_gamma",
    "objective.reference": "ref_model ref_model_name_or_path",
    "objective.reference=precomputed": "precompute_ref_log_probs",
    "data.label_names": "id2label",
    "objective.center_weight": "center_rewards_coefficient",
    "teacher.path": "teacher_model_name_or_path teacher_model teacher_model_path",
    "objective.temperature": "temperature",
    "data.subset": "dataset_config_name dataset_config",
    "model.init=random": "from_scratch train_from_scratch",
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
    "dataset dataset_name dataset_path train_file data_path data_files train_data dataset.source "
    "dataset.data_files dataset_dir datasets": "For a file, or the name of a hub dataset, write data={value}",
    "eval_file validation_file eval_dataset valid_file test_file": "It needs data=jsonl, or another option of data "
    "that has it",
    "load_in_8bit quantization_bit quant_bits": "It stores the frozen weights in 4 bits",
    "load_best_model_at_end metric_for_best_model save_best": "It keeps the checkpoint of the lowest held-out loss, "
    "and needs checkpoint.every",
    "saves_per_epoch evals_per_epoch run_val_every_n_steps log_every_n_steps": "It counts optimizer steps",
    "max_steps_per_epoch": "It counts the steps of the whole run",
    "max_prompt_length max_completion_length": "It counts the tokens of a prompt with its answer",
    "ref_model ref_model_name_or_path": "The reference is the model before training; the key is precomputed, "
    "frozen_copy or adapters_off",
    "lora_target_linear": "It is [all-linear] by default, with peft=lora",
    "text_field dataset_text_field": "It needs data=text or data=pysource",
    "lora_r lora_rank r lora_dim lora_alpha lora_dropout use_rslora use_dora lora_target_parameters": "It needs "
    "peft=lora",
    "target_modules lora_target_modules lora_target lora_targets": "It needs peft=lora, and is a list, such as "
    "[q_proj,v_proj]",
}
"""Names in other tools -> unit of this schema's key, or what else it needs."""
_NO_KEYS = {
    "assistant_only_loss completion_only_loss train_on_inputs train_on_input train_on_prompt mask_prompt "
    "response_template": "only responses, and the assistant's turns, have a loss; remove it",
    "eos_token pad_token bos_token special_tokens add_special_tokens pad_to_sequence_len": "the tokenizer's own tokens "
    "are used; remove it, or set model.tokenizer",
    "message_field_training": "flags of messages (train, weight, loss) are read as they are; remove it",
    "push_to_hub hub_model_id hub_token": "remove it; scripts/export.py RUN --push OWNER/NAME uploads after the run",
    "remove_unused_columns dataloader_num_workers dataloader_pin_memory dataset_num_proc dataset_processes "
    "preprocessing_num_workers streaming dataset_streaming shuffle_merged_datasets": "rows are tokenized once and "
    "read without workers; remove it",
    "do_train do_eval do_predict overwrite_output_dir plot_loss stage task_type model_type trainer_cls": "the recipe "
    "and the model decide it; remove it",
    "config config_file configs": "a file of settings is conf/experiment/NAME.yaml; write experiment=NAME",
}
"""Names of other tools without a key of this schema -> what to do instead."""
_GROUPS = {
    "optimizer": "optim optimizer_name optimizer_type optim_type optimizer._component_",
    "peft": "adapter finetuning_type train_type tuner_type peft_type peft_method",
    "objective": "rl rlhf_type trainer_type",
}
"""Group -> names of other tools whose values name its options."""
_OPTIONS = {
    "optimizer=adamw": "adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_anyprecision adamw_bnb "
    "paged_adamw paged_adamw_32bit",
    "optimizer=adamw8bit": "adamw_8bit adam8bit adam_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit "
    "ao_adamw_8bit pagedadamw8bit",
    "optimizer=lion": "lion_8bit lion_32bit paged_lion_8bit paged_lion_32bit",
    "peft=none": "full full_finetune false off no",
    "peft=lora": "true adapter ia3 adalora",
    "peft=qlora": "4bit nf4 lora_4bit",
    "parallelism=fsdp2": "fsdp fsdp1 fully_shard full_shard zero1 zero2 zero3 deepspeed deepspeed_zero3 megatron_fsdp",
    "parallelism=ddp": "dp data_parallel multi_gpu no_shard",
    "parallelism=hsdp": "hybrid_shard hybrid",
    "objective=next_token": "sft clm causal_lm cross_entropy ce",
    "objective=dpo": "sigmoid ipo hinge rl preference",
    "objective=reward": "rm reward_model reward_modeling",
    "data=jsonl": "json csv sft prompt_completion instruction local",
    "data=chat_jsonl": "chat sharegpt conversations conversation messages openai chatml chat_template",
    "data=text": "txt completion pretrain plain_text raw",
    "data=preferences": "pairs dpo preference paired",
    "cluster=local": "none single standalone laptop",
}
"""Option -> names of it in other tools."""


@functools.cache
def _keys_of() -> Mapping[str, Sequence[str]]:
    """Return the keys that each name in another tool may mean."""
    keys: dict[str, list[str]] = {}
    for key, names in _NAMES.items():
        for name in names.split():
            keys.setdefault(name, []).append(key)
    return keys


def note_on(name: str, value: object) -> str:
    """Return how the key that other tools call `name` differs from it, as a sentence after the key; or ''."""
    same = name.lower().replace("-", "_")
    note = next((note for names, note in _NOTES.items() if same in names.split()), None)
    return f" {note.format(value=value)}" if note else ""


def without_key(name: str) -> str:
    """Return what to do instead of setting a name of another tool that has no key here, for a message; or ''."""
    same = name.lower().replace("-", "_")
    return next((f"; {text}" for names, text in _NO_KEYS.items() if same in names.split()), "")


def option_meant(name: str, value: object) -> str | None:
    """Return the option, as GROUP=OPTION, that a name and a value of another tool select; or None."""
    same, text = name.lower().replace("-", "_"), str(value).rpartition(".")[2].lower()
    group = next((group for group, names in _GROUPS.items() if same in names.split()), None)
    return None if group is None else f"{group}={option_synonym(group, text) or text}"


def synonym_of(name: str, keys: Collection[str]) -> str | None:
    """Return the key, or the setting (peft=lora), that other tools call `name` and whose key is in `keys`; or None."""
    candidates = _keys_of().get(name.lower().replace("-", "_"), ())
    return next((key for key in candidates if key.partition("=")[0] in keys), None)


def option_synonym(group: str, name: str) -> str | None:
    """Return the option of a group that other tools call `name`, or None."""
    same = name.lower().replace("-", "_")
    matching = (option for option, names in _OPTIONS.items() if same in names.split())
    return next((option.partition("=")[2] for option in matching if option.startswith(f"{group}=")), None)
