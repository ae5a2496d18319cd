"""Stable latent mixture of experts (k3 section 1.5) and what keeps its experts equally busy (k3 section 8.2).

    s = sigmoid(router x);  T = the top_k of s + bias;  p_j = s_j / sum_T s * scale
    y = up(RMSNorm(sum_T p_j E_j(down x))) + shared(x)

The bias decides who is chosen and never enters a weight. Training observes, per optimiser step, which bias would have
spread that step's tokens evenly (`ops.balance`); `balance_` applies it to the next step. In eval mode nothing is
observed and the bias stands still.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nonet.model.config import ModelConfig, MoEConfig
from nonet.model.ffn import FFN, GatedActivation, RMSNorm, wide
from nonet.ops.balance import QuantileHistogram, sign_bias
from nonet.ops.experts import experts
from nonet.quant.qat import UNQUANTISED


class Router(nn.Module):
    """Scores in float32 at least: they decide, and a decision should not hang on bfloat16's rounding."""

    def __init__(self, d_model: int, moe: MoEConfig):
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, d_model))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(moe.experts), requires_grad=False)
        self.observed: QuantileHistogram | None = None  # of this optimiser step, over all its micro-batches

    def forward(self, x_ND: Tensor, real_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """(chosen_NK, weight_NK). real_N: False on padding, which is routed but not observed."""
        scores_NE = torch.sigmoid(wide(x_ND) @ wide(self.weight).t())
        biased_NE = scores_NE + self.e_score_correction_bias
        k = self.moe.top_k
        best = biased_NE.detach().topk(k + 1, dim=-1)
        chosen_NK = best.indices[:, :k]
        if self.training and torch.is_grad_enabled() and self.moe.balance != "none":
            self._observe(scores_NE.detach(), best.values[:, k], real_N)
        weight_NK = scores_NE.gather(1, chosen_NK)
        if self.moe.renormalise:
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-20)
        return chosen_NK, weight_NK * self.moe.scale

    def _observe(self, scores_NE: Tensor, threshold_N: Tensor, real_N: Tensor | None) -> None:
        if self.observed is None:
            self.observed = QuantileHistogram(self.e_score_correction_bias.detach(), self.moe.top_k)
        if real_N is not None:
            scores_NE, threshold_N = scores_NE[real_N], threshold_N[real_N]
        self.observed.add(scores_NE, threshold_N)

    @torch.no_grad()
    def balance_(self) -> float | None:
        """Move the bias by what was observed since the last call. Returns MaxVio (busiest over mean, minus one) of the
        observed choices; None if nothing was observed.
        """
        if self.observed is None or not self.observed.tokens:
            return None
        seen, self.observed = self.observed, None
        bias = self.e_score_correction_bias
        bias.copy_(seen.bias() if self.moe.balance == "quantile" else sign_bias(bias, seen.load_E, self.moe.sign_step))
        return float(seen.max_violation())


class Experts(nn.Module):
    """All routed experts' weights, stacked; Hugging Face files hold them one by one (experts.{e}.w1, w3, w2)."""

    def __init__(self, config: ModelConfig, moe: MoEConfig):
        super().__init__()
        E, F, D = moe.experts, moe.d_ff, config.expert_width
        self.w1 = nn.Parameter(torch.empty(E, F, D))  # gate
        self.w3 = nn.Parameter(torch.empty(E, F, D))  # up
        self.w2 = nn.Parameter(torch.empty(E, D, F))  # down
        self.act, self.quant = GatedActivation(config), config.quant or UNQUANTISED

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weight_NK: Tensor) -> Tensor:
        """x_ND are the experts' inputs. With quantisation on, weights and both products' inputs pass its grid."""
        q = self.quant
        named = (("w1", self.w1), ("w3", self.w3), ("w2", self.w2))
        w1, w3, w2 = (q.apply(w, "routed_expert_weights", f"experts.{name}") for name, w in named)

        def act(gate: Tensor, up: Tensor) -> Tensor:
            return q.apply(self.act(gate, up), "routed_expert_inputs", "the experts' hidden vectors")

        x_ND = q.apply(x_ND, "routed_expert_inputs", "the experts' inputs")
        return experts(x_ND, chosen_NK, weight_NK, w1, w3, w2, act)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        moe = config.moe
        assert moe is not None
        d = config.d_model
        self.gate = Router(d, moe)
        self.experts = Experts(config, moe)
        self.shared_experts = FFN(config, moe.shared * moe.d_ff) if moe.shared else None
        self.latent = moe.latent > 0
        if self.latent:
            self.routed_expert_down_proj = nn.Linear(d, moe.latent, bias=False)
            self.routed_expert_up_proj = nn.Linear(moe.latent, d, bias=False)
            self.routed_expert_norm = RMSNorm(moe.latent, config.norm_eps)

    def forward(self, x_BTD: Tensor, valid_BT: Tensor | None) -> Tensor:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        chosen_NK, weight_NK = self.gate(x_ND, None if valid_BT is None else valid_BT.reshape(-1))
        inputs = self.routed_expert_down_proj(x_ND) if self.latent else x_ND
        routed = self.experts(inputs, chosen_NK, weight_NK.to(x_ND))
        if self.latent:
            routed = self.routed_expert_up_proj(self.routed_expert_norm(routed))
        y = routed if self.shared_experts is None else routed + self.shared_experts(x_ND)
        return y.view_as(x_BTD)
