"""Per-head Muon for the matrices inside blocks, AdamW for everything else: K3's split (k3 section 8.5).

Muon orthogonalises the momentum of a matrix (Newton-Schulz), scaled to the root-mean-square an AdamW step has, so one
learning rate serves both. Three units of orthogonalisation: query, key and value projections go head by head, because
in one matrix the heads with the largest gradients would drown the others; routed experts expert by expert; every other
projection whole. Units of one shape are stacked and orthogonalised together, layers side by side.

Which parameter is trained how is decided by its name in `RULES`; a name without a rule is an error, never a default.
Parameters without gradient (a router's selection bias) are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nonet.model.attention import GQA, MLA
from nonet.model.kda import KDA

Named = tuple[str, nn.Parameter]
Rule = Literal["heads", "experts", "whole", "decayed", "plain"]

_WHOLE = "q_a|g|o|f_a|f_b|b|g_a|g_b|gate|up|down|eh|routed_expert_down|routed_expert_up"
# End of a parameter's name -> its unit of orthogonalisation, or AdamW with ("decayed") or without ("plain") weight
# decay. A vector that scales, shifts or asks is not shrunk; tables, convolutions and routers are.
RULES: tuple[tuple[str, Rule], ...] = (
    (r"(^|\.)self_attn\.(q|k|v|q_b|kv_b)_proj\.weight$", "heads"),
    (r"(^|\.)experts\.w[123]$", "experts"),
    (rf"(^|\.)(({_WHOLE})_proj|kv_a_proj_with_mqa|fc)\.weight$", "whole"),
    (r"(^|\.)(embed_tokens|lm_head|[qkv]_conv1d|mlp\.gate)\.weight$", "decayed"),
    (r"\.lora_[AB]\.weight$", "decayed"),
    (r"(_res\.proj|norm|fc_norm\.\d+)\.weight$", "plain"),
    (r"(^|\.)(A_log|dt_bias|bias)$", "plain"),
)

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of the quintic whose slope at zero is steepest (K. Jordan's Muon)
NEWTON_SCHULZ_STEPS = 5
_EPS = 1e-7
_AT_ONCE = 1 << 24  # numbers orthogonalised in one stack: bounds the memory a step needs


def rule_of(name: str) -> Rule:
    """How the parameter of this name is trained.

    >>> rule_of("layers.3.self_attn.kv_b_proj.weight"), rule_of("layers.3.mlp.gate.weight"), rule_of("norm.weight")
    ('heads', 'decayed', 'plain')
    """
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return rule
    raise AssertionError(f"parameter {name!r}: no rule in model.optimizer.RULES says how it is trained; add one")


def head_counts(model: nn.Module) -> dict[str, int]:
    """Name of every query, key and value projection -> how many heads its rows divide into."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, GQA | MLA | KDA):
            for part in ("q", "k", "v", "q_b", "kv_b"):
                shared = module.kv_heads if isinstance(module, GQA) and part in ("k", "v") else module.heads
                if hasattr(module, f"{part}_proj"):
                    counts[f"{name}.{part}_proj.weight"] = shared
    return counts


@dataclass(frozen=True)
class Unit:
    """A parameter as `blocks` matrices [rows, columns] that are orthogonalised one by one."""

    name: str
    parameter: nn.Parameter
    blocks: int
    rows: int
    columns: int

    def stack(self, x: Tensor) -> Tensor:
        return x.reshape(self.blocks, self.rows, self.columns)


@dataclass(frozen=True)
class Groups:
    """Every trainable parameter exactly once."""

    muon: list[Unit]
    decayed: list[Named]
    plain: list[Named]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*(u.parameter for u in self.muon), *(p for _, p in self.decayed), *(p for _, p in self.plain)]


def split(named: Iterable[Named], kind: str, heads: Mapping[str, int] | None = None) -> Groups:
    """Partition the trainable parameters. kind "muon" or "adamw" (no units: matrices are decayed by AdamW too).

    heads: from `head_counts`; a projection it does not name is one unit whole.
    """
    if kind not in ("muon", "adamw"):
        raise ValueError(f"optimizer kind {kind!r}: must be muon or adamw")
    trained = [(n, p) for n, p in named if p.requires_grad]
    groups = Groups([], [], [])
    for name, p in trained:
        rule = rule_of(name)
        if rule == "plain":
            groups.plain.append((name, p))
        elif rule == "decayed" or kind == "adamw":
            groups.decayed.append((name, p))
        else:
            groups.muon.append(_unit(name, p, rule, heads or {}))
    if len({id(p) for p in groups.parameters}) != len(trained):
        raise AssertionError("optimiser groups do not partition the parameters: one is named twice")
    return groups


def _unit(name: str, p: nn.Parameter, rule: Rule, heads: Mapping[str, int]) -> Unit:
    blocks = p.shape[0] if rule == "experts" else heads.get(name, 1) if rule == "heads" else 1
    if p.ndim != (3 if rule == "experts" else 2) or (rule != "experts" and p.shape[0] % blocks):
        raise AssertionError(f"parameter {name!r} of shape {tuple(p.shape)}: not {blocks} matrices")
    return Unit(name, p, blocks, p.numel() // blocks // p.shape[-1], p.shape[-1])


# ----------------------------------------------------------------------------------- Muon


def orthogonalise(x_NAB: Tensor) -> Tensor:
    """Each matrix U S V^T becomes about U V^T (singular values in roughly 0.7 to 1.2), in bfloat16 as torch does.

    A quintic Newton-Schulz iteration on the wide form: x <- a x + (b G + c G^2) x with G = x x^T.
    """
    tall = x_NAB.shape[1] > x_NAB.shape[2]
    x = (x_NAB.mT if tall else x_NAB).to(torch.bfloat16)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_EPS)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.mT if tall else x


class Muon:
    """Nesterov momentum, orthogonalised unit by unit; the update of an A x B unit is scaled by 0.2 sqrt(max(A, B)).

    On units that are whole matrices this is torch.optim.Muon with adjust_lr_fn="match_rms_adamw".
    """

    def __init__(self, units: Sequence[Unit], weight_decay: float):
        self.weight_decay = weight_decay
        self.momentum = {u.name: torch.zeros_like(u.parameter, requires_grad=False) for u in units}
        shapes: dict[tuple[int, int], list[Unit]] = {}
        for u in units:
            shapes.setdefault((u.rows, u.columns), []).append(u)
        self._stacks = [stack for same in shapes.values() for stack in _stacks(same)]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for stack in self._stacks:
            live = [(u, u.parameter.grad) for u in stack if u.parameter.grad is not None]
            if live:
                self._update(live, lr)

    def _update(self, live: list[tuple[Unit, Tensor]], lr: float) -> None:
        """One stack: momenta, all units orthogonalised in one call, weights."""
        ahead: list[Tensor] = []
        for u, gradient in live:
            momentum = self.momentum[u.name].lerp_(gradient, 1 - MOMENTUM)
            ahead.append(u.stack(gradient.lerp(momentum, MOMENTUM)))
        update_NAB = orthogonalise(torch.cat(ahead)).to(ahead[0].dtype)
        rows, columns = update_NAB.shape[1:]
        parts = update_NAB.split([u.blocks for u, _ in live])
        for (u, _), part in zip(live, parts, strict=True):
            u.parameter.mul_(1 - lr * self.weight_decay)
            u.parameter.add_(part.reshape(u.parameter.shape), alpha=-lr * 0.2 * max(rows, columns) ** 0.5)

    def zero_grad(self) -> None:
        for stack in self._stacks:
            for u in stack:
                u.parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        return self.momentum

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self.momentum.keys():
            raise ValueError(f"Muon state names other parameters: {sorted(state.keys() ^ self.momentum.keys())[:4]}")
        for name, kept in self.momentum.items():
            kept.copy_(state[name])


def _stacks(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units of one shape in stacks of bounded size; a single larger unit is a stack by itself."""
    stack: list[Unit] = []
    for u in units:
        if stack and sum(x.parameter.numel() for x in stack) + u.parameter.numel() > _AT_ONCE:
            yield stack
            stack = []
        stack.append(u)
    yield stack


# ------------------------------------------------------------------------------ the two together


class Optimizer:
    """AdamW over all parameters (kind "adamw"), or Muon over matrices and AdamW over the rest (kind "muon").

    heads: `head_counts(model)` for per-head Muon; None orthogonalises every projection whole.
    """

    def __init__(
        self,
        named: Iterable[Named],
        kind: str,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        heads: Mapping[str, int] | None = None,
    ):
        groups = split(named, kind, heads)
        self.parameters = groups.parameters
        tables = ((groups.decayed, weight_decay), (groups.plain, 0.0))
        adamw = [{"params": [p for _, p in part], "weight_decay": wd} for part, wd in tables if part]
        self.adamw = torch.optim.AdamW(adamw, lr=lr, betas=betas, fused=True) if adamw else None
        self.muon = Muon(groups.muon, weight_decay) if groups.muon else None

    def step(self, lr: float, grad_clip: float) -> float:
        """Clip, update, clear. Returns the gradient's norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, grad_clip))
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.adamw.zero_grad(set_to_none=True)
        if self.muon is not None:
            self.muon.step(lr)
            self.muon.zero_grad()
        return norm

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in (self.adamw, self.muon) if part is not None]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip([p for p in (self.adamw, self.muon) if p is not None], states, strict=True):
            part.load_state_dict(state)
