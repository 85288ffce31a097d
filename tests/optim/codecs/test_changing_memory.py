"""Coding of memory that somebody else writes at the same time: what was checked is what is coded. (The kernels read a
value once; here they are off.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from optim.codecs import CODECS, bits, blockwise, codebook, floats, tables, topk
from optim.codecs.rows import absmax
from peer.errors import ProtocolViolation
from tests.optim.kernels.torch_only import torch_only

Spoil = Callable[[torch.Tensor], object]
SPOILS: dict[str, Spoil] = {
    "nan": lambda x: x.fill_(math.nan),
    "infinity": lambda x: x.fill_(math.inf),
    "huge": lambda x: x.fill_(3e38),
}


@pytest.fixture(autouse=True)
def without_kernels() -> Iterator[None]:
    with torch_only():
        yield


def spoiling(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor, spoil: Spoil) -> None:
    """Have `x` spoiled right after each check for values that are not finite."""

    def checked(values: torch.Tensor) -> torch.Tensor:
        largest = absmax(values)
        spoil(x)
        return largest

    for module in (bits, blockwise, codebook, floats, tables, topk):
        monkeypatch.setattr(module, "absmax", checked)


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numel", [4096 * 3, 1000])
def test_no_code_is_refused_by_its_receiver(monkeypatch: pytest.MonkeyPatch, name: str, numel: int, spoil: str) -> None:
    codec = CODECS[name]
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    spoiling(monkeypatch, x, SPOILS[spoil])
    try:
        data, sqnorm = codec.encode_with_sqnorm(x)
    except ProtocolViolation:
        return  # not sent
    monkeypatch.undo()
    assert bool(torch.isfinite(codec.decode(data, numel)).all())
    assert sqnorm == codec.decoded_sqnorm(data, numel)


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_a_cast_is_that_of_the_checked_values(monkeypatch: pytest.MonkeyPatch, name: str, spoil: str) -> None:
    codec = CODECS[name]
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    expected = codec.encode(x.clone())
    spoiling(monkeypatch, x, SPOILS[spoil])
    assert torch.equal(codec.encode(x), expected)
