"""Private parts of AOTAutograd, which differentiates graphs."""
from __future__ import annotations

from torch._functorch import config  # the partitioner's settings
from torch._functorch.aot_autograd import aot_export_joint_simple  # the joint forward and backward graph of a section
from torch._functorch.partitioners import min_cut_rematerialization_partition  # which values a backward needs saved

__all__ = ["aot_export_joint_simple", "config", "min_cut_rematerialization_partition"]
