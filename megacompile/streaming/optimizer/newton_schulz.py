"""The nearest orthogonal matrix, about, by the Newton-Schulz iteration of Muon (Jordan et al., "Muon: an optimizer for hidden
layers in neural networks", 2024), with the operations and roundings of `torch.optim.Muon`."""
from __future__ import annotations

import torch
from torch import Tensor


def orthogonal(given: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, scratch: Tensor) -> Tensor:
    """fp32 [rows, columns] -> bf16 [rows, columns], with singular values of about 1, in `scratch`: uint8, of at least
    `products_bytes`."""
    a, b, c = coefficients
    rows, columns = given.shape
    least, count = min(rows, columns), rows * columns
    values = scratch.view(torch.bfloat16)
    matrix, other = (values[at:at + count].view(rows, columns) for at in (0, count))
    gram, product = (values[2 * count + at:2 * count + at + least * least].view(least, least) for at in (0, least * least))
    matrix.copy_(given)
    if rows > columns:
        matrix, other = matrix.T, other.T
    matrix.div_(matrix.norm().clamp(min=eps))  # no singular value is above 1
    for _ in range(steps):
        torch.mm(matrix, matrix.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=product)
        torch.addmm(matrix, product, matrix, beta=a, out=other)
        matrix, other = other, matrix
    return matrix.T if rows > columns else matrix
