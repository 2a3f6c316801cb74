"""How many pairs of a token and an expert each expert got in a training step, and biases of routers that follow them."""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError

#: Names of biases that choose experts and do not weight them.
BIASES = ("e_score_correction_bias", "expert_bias")


def loads_of(counted: Iterable[Mapping[tuple[str, int], Tensor]], calls: Collection[str]) -> dict[str, Tensor]:
    """The number of pairs that each expert got, int64 [experts], by layer. Pieces of one layer's experts are joined. `counted`:
    `Batch.ends_of_experts` of each batch, which the device must have computed. `calls`: the names of the model's calls."""
    ends: dict[tuple[str, int], Tensor] = {}
    for batch in counted:
        for key, each in dict(batch).items():  # a copy: a lane may be adding to it
            ends[key] = ends.get(key, 0) + each.cpu().long()
    found: dict[str, Tensor] = {}
    for (call, _), each in ends.items():
        # A piece is named after its layer: model.layers.3.mlp.experts.pieces.0
        layer = next((name for name in calls if call.startswith(f"{name}.")), call)
        load = each.diff(prepend=each.new_zeros(1))
        found[layer] = torch.cat([found[layer], load]) if layer in found else load
    return found


def imbalance(loads: Mapping[str, Tensor]) -> dict[str, float]:
    """`expert_load_max`, the load of a layer's busiest expert over the mean, and `expert_idle`, the share of experts without a
    token: means over layers. Empty without loads."""
    if not loads:
        return {}
    busiest = [float(load.max() / load.double().mean().clamp(min=1e-9)) for load in loads.values()]
    idle = [float((load == 0).double().mean()) for load in loads.values()]
    return {"expert_load_max": sum(busiest) / len(busiest), "expert_idle": sum(idle) / len(idle)}


def move_biases(model: nn.Module, loads: Mapping[str, Tensor], rate: float) -> None:
    """Adds `rate` to the bias of each expert with less than the mean load of its layer, and subtracts it from those with more
    (balancing without an auxiliary loss: arXiv 2408.15664, used by DeepSeek-V3). Raises `UnsupportedError` if no router of
    these layers has such a bias."""
    moved = 0
    for layer, load in loads.items():
        module = model.get_submodule(layer.partition("@")[0])
        for name, bias in (*module.named_buffers(), *module.named_parameters()):
            if name.rpartition(".")[2] in BIASES and bias.numel() == load.numel():
                with torch.no_grad():
                    direction = torch.sign(load.double().mean() - load.double())
                    bias.add_((rate * direction).to(bias).view_as(bias))
                moved += 1
    if not moved:
        raise UnsupportedError(f"no router of {type(model).__name__} has a bias that chooses experts ({' or '.join(BIASES)}), "
                               "or no step has trained yet: train the router's auxiliary loss (output_router_logits=True)")
