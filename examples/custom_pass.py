"""Two passes of your own: one delays prefetches, the other rewrites every layer's graph.

    python examples/custom_pass.py

`late_prefetch` changes the schedule: weights arrive right before their first use, so no copy overlaps with a kernel.
`square_by_product` changes the templates: `x ** 2` becomes `x * x`. Neither changes a bit of the
trained weights. The verifier proves the schedule after every pass, and its error names the pass that broke it.
"""
from __future__ import annotations

import torch
from torch import fx
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE, insert_after
from megacompile.passes.template import Target, copy_graph
from megacompile.plan import Plan
from megacompile.program import Program, copy_section, find, uses


class LatePrefetch:
    """Moves each prefetch to right before its first use. Runs after `prefetch`; later passes choose slots and order lanes."""

    name, requires, provides = "late_prefetch", "prefetch", "prefetch"

    def run(self, program: Program, plan: Plan) -> Program:
        sections = {}
        for key, graph in program.sections.items():
            sections[key] = copy_section(graph)  # a pass does not change the program that it gets
            for arrival in list(find(sections[key], "prefetch")):
                users = uses(sections[key], arrival)
                if users:
                    users[0].prepend(arrival)
        return program.evolve(sections=sections)


class SquareByProduct:
    """Replaces squares by products in the graphs that run: ATen ops, after differentiation."""

    name, level = "square_by_product", "variant"

    def run(self, graph: fx.GraphModule, target: Target) -> fx.GraphModule:
        result = copy_graph(graph)
        for node in result.graph.find_nodes(op="call_function", target=torch.ops.aten.pow.Tensor_Scalar):
            if node.args[1] == 2:
                node.target, node.args = torch.ops.aten.mul.Tensor, (node.args[0], node.args[0])
        result.recompile()
        return result


def train(**options: object) -> tuple[torch.nn.Module, list[float]]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1))
    model = megacompile.stream(model, device="cpu", micro_batch_size=2, **options)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        tokens = torch.randint(64, (4, 16))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    usual, losses = train()
    changed, same = train(passes=insert_after(PIPELINE, "prefetch", LatePrefetch()),
                          template_passes=insert_after(TEMPLATE_PIPELINE, "chunk_tokens", SquareByProduct()))
    print(changed.megacompile.program(stage="late_prefetch").text("forward"))
    for step, (a, b) in enumerate(zip(losses, same, strict=True), 1):
        print(f"step {step}: loss {a:.6f}, with both passes {b:.6f}")
    equal = all(torch.equal(a, b) for a, b in zip(usual.state_dict().values(), changed.state_dict().values(), strict=True))
    print(f"weights are {'bit-identical' if equal else 'different'}")
