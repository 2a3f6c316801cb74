"""Weights in four and eight bits: each is the nearest value of its format, and the bytes are those of bitsandbytes."""
from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megacompile.weights.codes import FORMATS, NF4, EightBits, Format, FourBits, ScaledFloats, dynamic_map

SHAPE = (192, 128)
#: Any weights, the same everywhere.
KNOWN = (((torch.arange(192 * 128) * 2654435761 % 1000003).float() / 500000 - 1) ** 3).view(SHAPE)


def encoded(stored: Format, weight: Tensor) -> tuple[Tensor, Tensor]:
    shape = (weight.shape[0], weight.shape[1])
    codes, scales = (torch.empty(count, dtype=torch.uint8) for count in (stored.code_bytes(shape), stored.scale_bytes(shape)))
    stored.encode(weight.flatten().split(stored.piece(shape)), codes, scales, shape)
    return codes, scales


def rounded(stored: Format, weight: Tensor) -> Tensor:
    return stored.decode(*encoded(stored, weight), (weight.shape[0], weight.shape[1]))


def digest(values: Tensor) -> str:
    return hashlib.sha256(bytes(values.tolist())).hexdigest()[:16]


@pytest.mark.parametrize(("nested", "scales"), [(True, "538b1b4fd6f782ae"), (False, "52ef95bc65d27339")])
def test_four_bit_codes_and_scales_are_those_of_bitsandbytes(nested: bool, scales: str) -> None:
    """The digests are of what `bitsandbytes.functional.quantize_4bit` (version 0.50.2) returns for these weights."""
    found = encoded(FourBits(nested=nested), KNOWN)
    assert (digest(found[0]), digest(found[1])) == ("46d756007420fdcb", scales)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_layers_of_bitsandbytes_have_the_same_values_here(kind: str, nested: bool) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes")
    from megacompile.weights.quantizing import adopt_bitsandbytes

    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(128, 192, compute_dtype=torch.float32, quant_type=kind, compress_statistics=nested).to("cpu")
    model, x = torch.nn.Sequential(layer), torch.randn(5, 128)
    theirs = model(x).detach()
    adopt_bitsandbytes(model)
    assert torch.equal(model(x).detach(), theirs)


def test_eight_bit_layers_of_bitsandbytes_have_the_same_values_here() -> None:
    bnb: Any = pytest.importorskip("bitsandbytes")
    from megacompile.weights.quantizing import adopt_bitsandbytes

    model = torch.nn.Sequential(bnb.nn.Linear8bitLt(128, 192, has_fp16_weights=False).to("cpu"))
    weight = model[0].weight
    expected = weight.data.float() * weight.SCB[:, None] / 127
    adopt_bitsandbytes(model)
    torch.testing.assert_close(model[0].dequantized_weight(), expected)


@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]), st.sampled_from(["nf4", "int8"]))
def test_each_weight_becomes_the_nearest_value(seed: int, size: float, name: str) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) * size
    stored: Format = FourBits(nested=False) if name == "nf4" else FORMATS[name]
    values = rounded(stored, weight)
    largest = weight.abs().amax(1, keepdim=True)  # a block is a row here
    table = torch.tensor(NF4) if name == "nf4" else torch.arange(-127, 128) / 127
    nearest = (weight[:, :, None] - largest[:, :, None] * table).abs().amin(2)
    assert ((weight - values).abs() <= nearest * 1.0001 + 1e-6 * largest).all()


@pytest.mark.parametrize("stored", [
    FourBits(), FourBits(nested=False), FourBits(block=128), EightBits(), ScaledFloats()], ids=str)
def test_zeros_and_single_values_are_exact(stored: Format) -> None:
    weight = torch.zeros(4, 256)
    weight[2, 7] = 3.0
    values = rounded(stored, weight)
    assert torch.equal(values.nonzero(), weight.nonzero()) and values[2, 7] == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("stored", FORMATS.values(), ids=FORMATS)
def test_pieces_change_nothing(stored: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoded(stored, KNOWN)
    monkeypatch.setattr("megacompile.weights.codes._AT_ONCE", 1024)
    assert len(KNOWN.flatten().split(stored.piece(SHAPE))) > (1 if stored.rows > 1 else 10)
    assert all(torch.equal(a, b) for a, b in zip(encoded(stored, KNOWN), whole, strict=True))


def test_codes_of_float8_have_the_values_that_torch_gives_them() -> None:
    stored, codes = ScaledFloats((4, 16)), torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    assert stored.are_finite(codes) and not stored.are_finite(torch.tensor([0, 0xFF], dtype=torch.uint8))
    scales = torch.rand(1, 16) + 0.5
    values = stored.decode(codes, scales.view(-1).view(torch.uint8), (1, 254))
    expected = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(16)[:254]
    assert torch.equal(values.view(torch.int32), expected[None].view(torch.int32)), "to the sign of zero"


@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1.0, 1e30]), st.sampled_from([(130, 70), (3, 257), (128, 128)]))
def test_each_weight_becomes_the_nearest_float8_of_its_block(seed: int, size: float, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    values = rounded(ScaledFloats(), weight)
    for rows in range(0, shape[0], 128):
        for columns in range(0, shape[1], 128):
            part, found = (each[rows:rows + 128, columns:columns + 128] for each in (weight, values))
            scale = part.abs().max() / 448
            assert ((part - found).abs() <= (part.abs() / 16).clamp(min=scale * 2**-10) * 1.0001).all()


def test_scales_of_scales_lose_little() -> None:
    exact, nested = (rounded(FourBits(nested=nested), KNOWN) for nested in (False, True))
    assert (nested - exact).norm() < 0.005 * exact.norm()
    assert len(dynamic_map()) == 256 and (dynamic_map().diff() > 0).all()


def test_a_matrix_that_blocks_do_not_divide_does_not_fit_four_bits() -> None:
    assert not FourBits().fits((3, 5)) and FourBits().fits((3, 64)) and EightBits().fits((3, 5))
