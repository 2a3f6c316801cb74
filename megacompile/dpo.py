"""TRL's `DPOTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import trl

from megacompile.trainers.policy import PolicyTrainer


class DPOTrainer(PolicyTrainer, trl.DPOTrainer):
    """`trl.DPOTrainer` for a streamed policy. The reference model is streamed too.

    The reference is the given `ref_model`, or a frozen copy of the policy at this moment. With `precompute_ref_log_probs=True`
    the policy itself runs once over the data before training, which needs no second copy of the weights. With a
    `peft_config`, the streamed model is closed, wrapped with the adapter, and streamed again with the same options
    (`trainer.model`); the reference is then the same model without the adapter.

    A mixture is streamed again if it was streamed without the router loss that TRL adds (`router_aux_loss_coef`).

    Raises `UnsupportedError` for a router loss that the model was streamed without if `optimizers` are given, for
    `sync_ref_model`, and if TRL would copy an adapter; also what `reference_of` raises."""
