"""Decoder shapes and models of them with random weights, also with an adapter over frozen weights."""
from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from megacompile.loading import parameters_on_meta
from megacompile.planning.device import rank_in_job
from megacompile.planning.host_needs import EXACT, StateChoice
from megacompile.system.host_memory import available_host_bytes
from megacompile.weights.codes import Format, QuantizedExperts, QuantizedLinear, shape_of, weights_of_codes
from megacompile.weights.empty_models import initialize, replace_parameters
from megacompile.weights.quantizing import quantize
from megacompile.weights.tiling import CUDA_HOST_MARGIN_BYTES

#: Fields of a config from transformers; of Qwen2 unless `model_type` is given.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-7b": dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
                     num_attention_heads=28, num_key_value_heads=4),
    "qwen2-14b": dict(vocab_size=152064, hidden_size=5120, intermediate_size=13824, num_hidden_layers=48,
                      num_attention_heads=40, num_key_value_heads=8),
    "qwen2-32b": dict(vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64,
                      num_attention_heads=40, num_key_value_heads=8),
    "llama-70b": dict(model_type="llama", vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                      num_attention_heads=64, num_key_value_heads=8),
    "qwen3-moe-30b": dict(model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144,
                          moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
                          num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128),
    "gpt-oss-20b": dict(model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880,
                        num_local_experts=32, num_experts_per_tok=4, num_hidden_layers=24, num_attention_heads=64,
                        num_key_value_heads=8, head_dim=64, sliding_window=128),
    "gpt-oss-120b": dict(model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880,
                         num_local_experts=128, num_experts_per_tok=4, num_hidden_layers=36, num_attention_heads=64,
                         num_key_value_heads=8, head_dim=64, sliding_window=128),
    "mistral-7b": dict(model_type="mistral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                       num_attention_heads=32, num_key_value_heads=8, sliding_window=4096),
    "lfm2-1b": dict(model_type="lfm2", vocab_size=65536, hidden_size=2048, intermediate_size=12288, num_hidden_layers=16,
                    num_attention_heads=32, num_key_value_heads=8, block_auto_adjust_ff_dim=True,
                    layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]),
    # Hybrids: three of four layers have a gated delta rule; or state spaces, MLPs and attention are layers of their own.
    "qwen3.5-9b": dict(model_type="qwen3_5_text", vocab_size=248320, hidden_size=4096, intermediate_size=12288,
                       num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4, head_dim=256,
                       linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128),
    "qwen3.5-moe-35b": dict(model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048, moe_intermediate_size=512,
                            shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8, num_hidden_layers=40,
                            num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
                            linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128),
    "nemotron-h-8b": dict(model_type="nemotron_h", vocab_size=131072, hidden_size=4096, intermediate_size=21504,
                          layers_block_type=(["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"]) * 7,
                          num_hidden_layers=52, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                          mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8),
    "smollm2-135m": dict(model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                         num_attention_heads=9, num_key_value_heads=3),
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2),
    # Layers of the 7B shape, 1 to 5 times as wide. The vocabulary is small, so that the layers dominate.
    **{f"wide-{times}": dict(vocab_size=32000, hidden_size=3584 * times, intermediate_size=18944 * times, num_hidden_layers=4,
                             num_attention_heads=28 * times, num_key_value_heads=4 * times) for times in range(1, 6)},
}
#: Bytes of host memory for each parameter of the original model, whose memory may not be freed before training begins.
ORIGINAL_BYTES = 2


def config(shape: str, layers: int | None = None) -> Any:
    sizes = dict(SHAPES[shape]) | ({"num_hidden_layers": layers} if layers else {})
    for kinds in {"layer_types", "layers_block_type"} & sizes.keys():
        sizes[kinds] = sizes[kinds][:sizes["num_hidden_layers"]]
    return AutoConfig.for_model(sizes.pop("model_type", "qwen2"), **sizes, max_position_embeddings=2**20,
                                tie_word_embeddings=False)


def parameters(shape: str, layers: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config(shape, layers)).parameters())


def bytes_to_train(shape: str, layers: int, choice: StateChoice = EXACT, outside: StateChoice | None = None) -> int:
    """Bytes of host memory that training a shape in bfloat16 takes, beside its original weights. `choice`: the optimizer's
    state; `outside`: that of parameters outside of the layers (None: the same)."""
    one, all_of_them = parameters(shape, 1), parameters(shape, layers)
    others = 2 * one - parameters(shape, 2)
    slabs = 2 * one if choice.on_arrival else 0  # gradients of a layer, and of all else, on their way
    each, each_outside = (c.bytes(torch.bfloat16) + ORIGINAL_BYTES for c in (choice, outside or choice))
    return round((all_of_them - others) * each + others * each_outside) + slabs


def layers_that_fit(shape: str, host_bytes: int | None = None, choice: StateChoice = EXACT,
                    outside: StateChoice | None = None) -> int:
    """The largest number of layers of a shape that `host_bytes` of host memory (None: what is available) can train, at least
    1. State as for `bytes_to_train`."""
    available = (available_host_bytes() if host_bytes is None else host_bytes) - CUDA_HOST_MARGIN_BYTES
    one, two = (bytes_to_train(shape, count, choice, outside) for count in (1, 2))
    return max(1, min(SHAPES[shape]["num_hidden_layers"], 1 + (available - one) // (two - one)))


def random_model(shape: str, layers: int | None, device: str, lora: int = 0, stored: str | None = None) -> Any:
    """A bf16 model on the host. Weights have a standard deviation of 0.02, norms are 1. With several ranks, only rank 0 draws
    them; the models of the others are on the meta device.

    `lora`: the rank of PEFT's adapters on all linear layers, over frozen weights, whose values are drawn on `device`; 0: no
    adapters, and the values that `megacompile.from_config` draws. `stored`: the format of these frozen weights, as for
    `megacompile.quantize`."""
    with parameters_on_meta():
        model: Any = AutoModelForCausalLM.from_config(config(shape, layers), dtype=torch.bfloat16)
    if lora:
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear",
                                                 task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    if stored is not None:
        model = quantize(model, stored)
    torch.manual_seed(0)
    if rank_in_job() > 0:
        return model.train()
    if not lora:
        replace_parameters(model, {id(p): nn.Parameter(torch.empty_like(p, device="cpu")) for p in model.parameters()})
        initialize(model)
        return model.train()
    scales: dict[tuple[int, int], Tensor] = {}  # those of random weights, by shape

    def codes_and_scales(stored: Format, matrix: tuple[int, int]) -> tuple[Tensor, Tensor]:
        if matrix not in scales:
            scales[matrix] = _random_scales(stored, matrix)
        codes = torch.randint(256, (stored.code_bytes(matrix),), dtype=torch.uint8, device=device)
        return codes.cpu(), scales[matrix].clone()

    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.put(*codes_and_scales(module.stored, shape_of(module)))
        elif isinstance(module, QuantizedExperts):
            for name, stack in module.stacks.items():
                module.put(name, *codes_and_scales(module.stored, stack.matrix))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            value = value.fill_(1.0) if "norm" in name else value.zero_() if "lora_B" in name else value.normal_(0, 0.02)
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = nn.Parameter(value.cpu(), parameter.requires_grad)
    return model.train()


def _random_scales(stored: Format, matrix: tuple[int, int]) -> Tensor:
    """The scales of random weights in a format and shape."""
    codes, scales = (torch.empty(count, dtype=torch.uint8) for count in (stored.code_bytes(matrix), stored.scale_bytes(matrix)))
    size, count = stored.piece(matrix), matrix[0] * matrix[1]
    stored.encode((torch.randn(min(size, count - at)) * 0.02 for at in range(0, count, size)), codes, scales, matrix)
    return scales


def expert_count(config: Any) -> int:
    """The number of experts of a layer; 1 if it has none."""
    return next((count for name in ("num_experts", "num_local_experts") if (count := getattr(config, name, None))), 1)


def active_parameters(model: Any) -> int:
    """The number of parameters that a token uses; of experts, only those that it is routed to."""
    share = getattr(model.config, "num_experts_per_tok", 1) / expert_count(model.config)
    of_codes = weights_of_codes(model)
    return round(sum(of_codes.get(id(p), p.numel()) * (share if re.search(r"\.experts\.", name) else 1)
                     for name, p in model.named_parameters()))


def attention_flops(model: Any, length: int) -> float:
    """FLOPs of causal attention per token, forward and backward. In layers with a sliding window, a query sees at most the keys
    in it."""
    sizes = model.config
    width = sizes.num_attention_heads * (getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads)
    window = min(getattr(sizes, "sliding_window", None) or length, length)
    kinds = getattr(sizes, "layer_types", None) or ["sliding_attention"] * sizes.num_hidden_layers
    keys = [window if kind == "sliding_attention" else length for kind in kinds]
    return 12 * width * sum(seen - seen**2 / (2 * length) for seen in keys)
