"""The kind of model of a class: from transformers' own tables if they contain it, else by name."""
from __future__ import annotations

from transformers.models.auto import modeling_auto as tables

DECODER = "decoder-only Transformer"
#: Kind -> meaning, in the order of the page.
KINDS = {
    DECODER: "attention in every layer, text only",
    "hybrid": "recurrent or convolutional layers beside attention",
    "recurrent": "no attention",
    "multimodal": "a decoder with encoders of images or sound",
    "sequence-to-sequence": "only the decoder of such a model",
    "encoder": "an encoder with a language model's head, as a decoder",
}

_RECURRENT = {"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"}
_HYBRID = {
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "minimax",
    "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "zamba",
    "zamba2"}
#: Model types that are in no table of transformers.
_MULTIMODAL = {"gemma4_assistant", "gemma4_unified_assistant", "git", "mllama", "moshi", "musicgen", "musicgen_melody", "fuyu",
               "phi4_multimodal"}
_SEQUENCE_TO_SEQUENCE = {"trocr", "whisper"}


def kind_of(cls: str, model_type: str) -> str:
    """A key of `KINDS`. A class that builds an encoder of another modality is multimodal, whatever else it is."""
    if model_type in _RECURRENT:
        return "recurrent"
    if model_type in _HYBRID:
        return "hybrid"
    if cls.endswith("ForConditionalGeneration") or model_type in _MULTIMODAL:
        return "multimodal"
    if model_type in tables.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES or model_type in _SEQUENCE_TO_SEQUENCE:
        return "sequence-to-sequence"
    if model_type in tables.MODEL_FOR_MASKED_LM_MAPPING_NAMES or model_type == "bert-generation":
        return "encoder"
    return DECODER
