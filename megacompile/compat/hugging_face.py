"""Every part of transformers, TRL, PEFT and Accelerate that megacompile relies on although it is private or not documented.

The module imports none of these libraries: they are slow to import, and all but transformers are optional.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple


class Part(NamedTuple):
    """`owner`: the dotted name of a module, class or function. `name`: an attribute of it, or a word in its source, if only its
    objects have the attribute or the name is local. `parameters`: of a function that we call, or replace."""

    owner: str
    name: str
    purpose: str
    parameters: str = ""


_TRAINER, _ACCELERATOR = "transformers.Trainer", "accelerate.Accelerator"
_CONFIG, _MODEL = "transformers.PreTrainedConfig", "transformers.PreTrainedModel"
_LOADING, _OUTPUTS = "transformers.core_model_loading", "transformers.utils.output_capturing"
_EXPERTS, _MASKS = "transformers.integrations.moe", "transformers.masking_utils"
_QWEN3_NEXT, _BAMBA = "transformers.models.qwen3_next.modeling_qwen3_next", "transformers.models.bamba.modeling_bamba"
_MAMBA = "transformers.models.mamba.modeling_mamba"
_QWEN3_VL = "transformers.models.qwen3_vl.modeling_qwen3_vl"
_SFT, _ONLINE_DPO = "trl.trainer.sft_trainer", "trl.experimental.online_dpo.online_dpo_trainer"
_ONLINE = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
_TRL_TRAINERS = (_SFT, "trl.trainer.dpo_trainer", "trl.trainer.kto_trainer", *_ONLINE)
_REWARD = "trl.trainer.reward_trainer"
_VLLM, _CLIENT = "trl.generation.vllm_generation.VLLMGeneration", "trl.generation.vllm_client.VLLMClient"
_RECOMPUTED = "transformers.modeling_layers.GradientCheckpointingLayer"
_PARAMETER = "peft.tuners.lora.layer.ParamWrapper"
_LAYER, _WRAPPER = "peft.tuners.tuners_utils.BaseTunerLayer", "peft.utils.other.AuxiliaryTrainingWrapper"

PARTS = (
    # transformers: Trainer.
    Part("transformers.trainer", "Trainer", "know what its evaluations log"),
    Part(_TRAINER, "_created_lr_scheduler", "keep the schedule that a checkpoint restored"),
    Part(_TRAINER, "_determine_best_metric", "save the best model", "metrics trial"),
    Part(_TRAINER, "_load_from_checkpoint", "read weights with the state", "resume_from_checkpoint"),
    Part(_TRAINER, "_save_checkpoint", "write checkpoints while training continues", "model trial"),
    Part(_TRAINER, "_load_optimizer_and_scheduler", "read the state tile by tile", "checkpoint"),
    Part(_TRAINER, "_save_optimizer_and_scheduler", "write the state tile by tile", "output_dir"),
    Part(_TRAINER, "compute_loss", "tell whether the loss is the model's", "model inputs return_outputs num_items_in_batch"),
    Part(_TRAINER, "compute_loss_func", "the same"),
    Part(_TRAINER, "create_accelerator_and_postprocess", "set up the accelerator for a streamed model"),
    Part(_TRAINER, "current_gradient_accumulation_steps", "read the number of batches in a step"),
    Part(_TRAINER, "floating_point_ops", "count weights without waiting for them", "inputs"),
    Part(_TRAINER, "get_batch_samples", "read batches ahead", "epoch_iterator num_batches device"),
    Part(_TRAINER, "get_optimizer_cls_and_kwargs", "make our optimizer", "args model"),
    Part(_TRAINER, "label_smoother", "tell whether the loss is the model's"),
    Part(_TRAINER, "model_accepts_loss_kwargs", "leave the number of targets out for losses that are means"),
    Part(_TRAINER, "model_wrapped", "tell whether another library has wrapped the model"),
    Part(_TRAINER, "training_step", "run a step as one program", "model inputs num_items_in_batch"),
    Part("transformers.trainer_callback", "PrinterCallback", "show steps in our own way"),
    Part("transformers.trainer_callback", "ProgressCallback", "the same"),
    Part("transformers.TrainingArguments", "_n_gpu", "keep Trainer from putting replicas on other GPUs"),
    # transformers: models and their configs.
    Part(_CONFIG, "_attn_implementation", "trace encoders with their own attention; tell eager attention"),
    Part(_CONFIG, "_experts_implementation", "refuse experts that cannot be traced; tell those that read only what is chosen"),
    Part(_CONFIG, "_name_or_path", "give an adapter's files the name of the model"),
    Part(_MODEL, "_hf_peft_config_loaded", "tell whether saving a model writes an adapter alone"),
    Part(_MODEL, "_is_hf_initialized", "initialize a module as in a new model"),
    Part(_MODEL, "_is_stateful", "generate in chunks only with a cache that allows it"),
    Part(_MODEL, "_keep_in_fp32_modules_strict", "load tensors in the dtype that the model needs"),
    Part(_MODEL, "_keys_to_ignore_on_load_missing", "load checkpoints without tensors that a model can do without"),
    Part(_MODEL, "_keys_to_ignore_on_load_unexpected", "load checkpoints with tensors of older versions"),
    Part(_MODEL, "initialize_weights", "draw the weights of a new model"),
    Part("transformers.GenerationMixin", "_supports_default_dynamic_cache", "generate in chunks only with such a cache"),
    Part("transformers.AutoModelForCausalLM", "_model_mapping", "find the class of a config"),
    Part("transformers.AutoModelForImageTextToText", "_model_mapping", "the same, of a decoder with an image encoder"),
    Part(_RECOMPUTED, "_gradient_checkpointing_func", "recompute image encoders"),
    Part(_RECOMPUTED, "gradient_checkpointing", "the same; switch it off in layers"),
    Part("transformers.models.mamba.modeling_mamba", "use_associative_scan", "switch off a scan that native runs do not use"),
    Part(_QWEN3_VL, "Qwen3VLTextModel", "know decoders that add features to several layers"),
    Part(f"{_QWEN3_VL}.Qwen3VLTextModel", "_deepstack_process", "take features aligned with tokens",
         "hidden_states visual_pos_masks visual_embeds"),
    Part(f"{_QWEN3_VL}.Qwen3VLModel", "compute_3d_position_ids", "compute positions on the host",
         "image_grid_thw video_grid_thw"),
    Part(f"{_QWEN3_VL}.Qwen3VLModel", "get_image_features", "make features in an op", "pixel_values image_grid_thw"),
    Part(f"{_QWEN3_VL}.Qwen3VLModel", "get_video_features", "the same", "pixel_values_videos video_grid_thw"),
    Part("transformers.utils.chat_template_utils", "render_jinja_template", "learn which tokens an assistant has written",
         "conversations tools chat_template return_assistant_tokens_mask"),
    # transformers: checkpoints.
    Part("transformers.conversion_mapping", "get_model_conversion_mapping", "name stored tensors as the loader does", "model"),
    Part(_LOADING, "WeightConverter", "the same: what takes more than a name"),
    Part(_LOADING, "WeightRenaming", "the same"),
    Part(f"{_LOADING}.WeightConverter", "operations", "tell parameters that are stored tensors one after the other"),
    Part(f"{_LOADING}.WeightConverter", "source_patterns", "the same: the order of the tensors"),
    Part(f"{_LOADING}.WeightConverter", "target_patterns", "the same"),
    Part(f"{_LOADING}.MergeModulelist", "dim", "the same: tensors that are stacked"),
    Part(f"{_LOADING}.Concatenate", "dim", "the same"),
    Part(_LOADING, "rename_source_key", "the same", "source_key weight_renamings weight_converters base_model_prefix"),
    Part(f"{_LOADING}.WeightRenaming", "was_used", "save the names that were read"),
    Part(_LOADING, "_weight_conversions", "the same; save a dequantized model in the usual layout"),
    # transformers: what is replaced or recognized while a model is traced.
    Part(_MASKS, "or_mask", "recognize masks with more than causal pairs, by the function's name"),
    Part(_MASKS, "sdpa_mask", "take the arguments of a mask function",
         "batch_size q_length mask_function attention_mask local_size use_vmap device"),
    Part("transformers.integrations.sdpa_attention", "sdpa_attention_forward", "take the arguments of an attention function",
         "module query key value attention_mask dropout scaling"),
    Part(_EXPERTS, "ALL_EXPERTS_FUNCTIONS", "run pieces of a module of experts"),
    Part(_EXPERTS, "_is_expert_parallel", "tell the function that tokens may be sent to other pieces"),
    Part(_EXPERTS, "is_transposed", "recognize modules of experts"),
    Part(_EXPERTS, "_grouped_linear", "multiply by the factors of an adapter too", "input weight offs bias is_transposed"),
    Part(_EXPERTS, "grouped_mm_experts_forward", "run experts whose parameters have other values",
         "self hidden_states top_k_index top_k_weights"),
    Part(_EXPERTS, "num_experts", "give a piece its number of experts"),
    Part(_OUTPUTS, "_hook_installation_lock", "recognize, in Dynamo's error, a model that collects hidden states"),
    Part(_OUTPUTS, "capture_outputs", "recognize forwards that collect outputs, by the decorator's module"),
    Part(_OUTPUTS, "maybe_install_capturing_hooks", "install the hooks before a trace", "model"),
    Part(_OUTPUTS, "output_capturing_hook", "recognize the hooks, by their module and what they close over"),
    Part("transformers.modeling_utils", "make_inputs_require_grads", "remove the hook, recognized by its name"),
    Part(_QWEN3_NEXT, "is_torchdynamo_exporting", "trace the branches of native runs"),
    Part(_QWEN3_NEXT, "causal_conv1d_fn", "call our op in a trace"),
    Part(_QWEN3_NEXT, "torch_chunk_gated_delta_rule", "the same"),
    Part("transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", "the same"),
    Part(_MAMBA, "mamba_selective_scan", "the same"),
    Part("transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru", "_rnn_scan", "the same"),
    Part("transformers.models.rwkv.modeling_rwkv", "rwkv_linear_attention", "the same"),
    Part("transformers.models.rwkv.modeling_rwkv.RwkvModel", "_rescale_layers", "refuse evaluations that change weights"),
    Part(_BAMBA, "mamba2_chunk_scan", "the same"),
    Part(_BAMBA, "mamba2_split_conv1d_scan_combined", "trace the parts of a mixer, not a kernel for all of it"),
    Part(_MAMBA, "mamba_inner_fn", "the same"),
    Part(_BAMBA, "create_recurrent_attention_mask", "give mixers the sequences of packed rows"),
    Part(_BAMBA, "apply_mask_to_padding_states", "leave packed rows as they are", "hidden_states attention_mask"),
    Part(f"{_BAMBA}.BambaMixer", "forward", "pass the sequences of packed rows to the functions that it calls"),
    Part("transformers.utils.import_utils", "TRANSFORMERS_DISABLE_TORCH_CHECK", "trace models without checks of values"),
    # TRL: trainers.
    Part("trl.trainer.base_trainer", "_BaseTrainer", "know that its evaluations log no more than Trainer's"),
    Part(f"{_SFT}.SFTTrainer", "_metrics", "log the number of tokens"),
    Part(f"{_SFT}.SFTTrainer", "_total_train_tokens", "the same"),
    Part(f"{_SFT}.SFTTrainer", "aux_loss_enabled", "compare the router loss with the one that was captured"),
    Part(f"{_SFT}.SFTTrainer", "router_aux_loss_coef", "the same"),
    Part("trl.experimental.online_dpo.OnlineDPOTrainer", "_forward", "compute log-probabilities by chunks of tokens",
         "model prompt_ids prompt_mask completion_ids completion_mask vision_inputs"),
    Part("trl.experimental.online_dpo.OnlineDPOTrainer", "_generate", "put tokens on the compute device"),
    Part("trl.experimental.online_dpo.OnlineDPOTrainer", "max_length", "cut prompts as TRL does"),
    Part(_VLLM, "_fix_param_name_to_vllm", "name weights as vLLM does", "name"),
    Part(_VLLM, "_iter_named_params", "send weights one at a time"),
    Part(_VLLM, "_weight_metadata", "tell whether names and shapes are asked for"),
    Part(_VLLM, "accelerator", "let one rank send weights"),
    Part(_VLLM, "mode", "the same"),
    Part(_VLLM, "sync_weights", "send weights again to a server that was lost"),
    Part(_VLLM, "vllm_client", "the same"),
    Part("trl.generation.vllm_generation", "VLLMClient", "notice that a server is lost"),
    Part(_CLIENT, "_finish_weight_update", "tell which weights a server has"),
    Part(_CLIENT, "_get", "notice that a server is lost", "url"),
    Part(_CLIENT, "_post", "the same", "url"),
    Part(_CLIENT, "base_url", "the same"),
    Part(_CLIENT, "check_server", "the same", "total_timeout retry_interval"),
    Part(_CLIENT, "close_communicator", "make another connection for weights"),
    Part(_CLIENT, "communicator", "the same"),
    Part(_CLIENT, "init_communicator", "the same", "device"),
    Part(_CLIENT, "session", "repeat no request"),
    Part(_CLIENT, "update_named_params", "see that weights are taken", "metadata named_params"),
    Part("trl.trainer.utils", "FusedCausalLMOutput", "return what TRL's fused head returns",
         "loss label_mask log_probs entropy log_sum_sq_probs mean_logits is_top1"),
    # TRL: names in its modules that have another value while a trainer is made.
    *(Part(module, "add_fused_lm_head", "give streamed models our head", "model temperature cast_lm_head_to_fp32 outputs")
      for module in _TRL_TRAINERS),
    *(Part(module, "create_model_from_path", "stream a model that is given by name", "model_id") for module in _TRL_TRAINERS),
    *(Part(module, "get_peft_model", "stream a model again with an adapter", "model peft_config") for module in _TRL_TRAINERS),
    Part(_REWARD, "get_peft_model", "the same", "model peft_config"),
    *(Part(module, "VLLMGeneration", "send the weights of a streamed model", "model") for module in _ONLINE),
    Part(_ONLINE_DPO, "create_reference_model", "stream the reference model", "model"),
    Part(_ONLINE_DPO, "VLLMClient", "notice that a server is lost"),
    Part(f"{_ONLINE_DPO}.OnlineDPOTrainer", "_move_model_to_vllm", "send the weights of a streamed model"),
    Part(f"{_ONLINE_DPO}.OnlineDPOTrainer", "vllm_client", "the same"),
    Part(_ONLINE_DPO, "prepare_peft_model", "stream a model again with an adapter", "model peft_config"),
    # PEFT.
    Part("peft.tuners.tuners_utils", "BaseTunerLayer", "find layers with an adapter"),
    Part(_LAYER, "active_adapters", "see that adapters stay as they were captured"),
    Part(_LAYER, "disable_adapters", "the same"),
    Part(_LAYER, "enable_adapters", "trace a model without its adapters", "enabled"),
    Part(_LAYER, "get_base_layer", "send weights with adapters merged"),
    Part(_LAYER, "merged_adapters", "see that adapters stay as they were captured"),
    Part(_PARAMETER, "_activate_lora", "add an adapter to the values of codes", "self active_adapters"),
    Part(_PARAMETER, "forward", "trace an adapter of a fused parameter by its factors", "self x"),
    Part(_PARAMETER, "get_delta_factors", "read these factors", "self adapter_name"),
    Part(_PARAMETER, "get_param", "tell matrices from stacks of matrices", "self"),
    Part(_PARAMETER, "parameter_name", "know which parameter has the adapter"),
    Part("peft.tuners.tuners_utils.BaseTuner", "prefix", "leave an adapter's weights out of those that are sent"),
    Part("peft.utils.other", "AuxiliaryTrainingWrapper", "find other modules that are trained with an adapter"),
    Part(_WRAPPER, "enable_adapters", "trace a model without its adapters", "enabled"),
    Part(_WRAPPER, "original_module", "leave weights that are not in use out of those that are sent"),
    Part("peft.tuners.lora.dora", "dequantize_module_weight", "let DoRA read weights as Dynamo can follow", "module"),
    Part("peft.peft_model", "make_inputs_require_grad", "remove the hook, recognized by its name"),
    # Accelerate.
    Part(_ACCELERATOR, "clip_grad_norm_", "leave clipping to the optimizer"),
    Part(_ACCELERATOR, "device_placement", "keep optimizer state where it is"),
    Part(_ACCELERATOR, "dispatch_batches", "put batches that one process reads on the device"),
    Part(_ACCELERATOR, "native_amp", "leave out an autocast to the model's own dtype"),
    Part(_ACCELERATOR, "prepare_data_loader", "the same", "data_loader device_placement"),
    Part(_ACCELERATOR, "prepare_model", "leave DistributedDataParallel out", "model evaluation_mode"),
    Part("accelerate.optimizer.AcceleratedOptimizer", "optimizer", "find our optimizer in the wrapper"),
    Part("accelerate.tracking", "LOGGER_TYPE_TO_CLASS", "start a tracker by its name"),
)


@contextlib.contextmanager
def replaced(owner: ModuleType | type, **values: Any) -> Iterator[None]:
    """A context in which attributes of a module or a class have other values. For libraries without hooks for this. Raises
    `AttributeError` if the owner lacks one of them."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
