"""Code that the integrations for the trainers of transformers and TRL share.

What they override or replace, and what transformers and TRL do not promise to keep:

- transformers' Trainer: the methods `_save_optimizer_and_scheduler` and `_load_optimizer_and_scheduler`; of its accelerator
  `clip_grad_norm_`, `prepare_model` and `prepare_data_loader` (`megacompile.trainer`).
- SFTTrainer: the attributes `_metrics` and `_total_train_tokens` (`megacompile.sft`).
- OnlineDPOTrainer: the methods `_generate` and `_forward` (`megacompile.online_dpo`).
- Names in TRL's modules, while a trainer is made: `add_fused_lm_head` and `get_peft_model` (`fused_head`),
  `create_model_from_path` (`reference_model`), `create_reference_model` and `prepare_peft_model` (`megacompile.online_dpo`),
  `VLLMGeneration` and its methods `_iter_named_params` and `_fix_param_name_to_vllm` (`sent_weights`).
"""
from __future__ import annotations
