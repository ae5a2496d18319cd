"""Block attention residuals (k3 section 1.4): instead of one sum, a layer reads a learned mixture of block sums.

    s_j = norm(v_j) . (proj * norm.weight);  h = sum_j softmax(s)_j v_j   over banked block sums and the running one

Every `attn_res_block` layers the running sum is banked and starts anew from the next sublayer's output. Queries (proj)
start at zero, so at first every site reads the plain mean.
"""

from __future__ import annotations

from torch import Tensor, nn

from nonet.model.ffn import RMSNorm
from nonet.ops.fused import mixture


class Stream:
    """What sublayers read from and add to. Where nothing is ever banked, it is the ordinary residual stream."""

    def __init__(self, x_BTD: Tensor):
        self.current: Tensor | None = x_BTD
        self._banked: list[Tensor] = []

    def read(self, site: Site | None) -> Tensor:
        """The mixture a site reads; the running sum itself where nothing is banked or the residual is ordinary."""
        assert self.current is not None
        return self.current if site is None or not self._banked else site([*self._banked, self.current])

    def bank(self) -> None:
        """Close the block: its sum becomes a source for all later sites."""
        assert self.current is not None
        self._banked.append(self.current)
        self.current = None

    def add(self, x_BTD: Tensor) -> None:
        self.current = x_BTD if self.current is None else self.current + x_BTD


class Site(nn.Module):
    """One place that mixes: a key norm and a query, of which only the product matters."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(width, eps)
        self.proj = nn.Linear(width, 1, bias=False)

    def forward(self, sources: list[Tensor]) -> Tensor:
        return mixture(sources, self.proj.weight[0] * self.norm.weight, self.norm.eps)
