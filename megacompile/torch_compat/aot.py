"""Private parts of AOTAutograd, which differentiates graphs."""
from __future__ import annotations

from torch._functorch import config  # the settings of AOT and of the partitioner
from torch._functorch.aot_autograd import aot_export_joint_simple  # the joint forward and backward graph of a section
from torch._functorch.partitioners import min_cut_rematerialization_partition  # which values a backward needs saved
from torch.fx._graph_pickler import GraphPickler, Options  # writes graphs of fakes as inductor's cache does

__all__ = ["GraphPickler", "aot_export_joint_simple", "config", "min_cut_rematerialization_partition", "options_for_graphs"]


def options_for_graphs() -> Options:
    """Options for pickling graphs of any ops."""
    return Options(ops_filter=None)
