"""K3's forward (k3 section 1) in plain float64, read straight off a Hugging Face directory.

Written for checking, not for speed: token by token, head by head where that is clearer, no state, no batch, nothing
shared with nonet.model. Two ways of llama.cpp can be asked for. `llamacpp`: the norms of MLA's two latents and the
lengths of KDA's q and k take rms_norm_eps, the only epsilon a GGUF file has; the published code has 1e-6 there.
`q8_inputs`: the routed experts' inputs are on ggml's Q8_0 grid (blocks of 32, scale amax / 127 kept in float16), as
llama.cpp's CPU kernels put them before they multiply with MXFP4 weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Oracle:
    def __init__(self, directory: Path, llamacpp: bool = False, q8_inputs: bool = False):
        raw = json.loads((directory / "config.json").read_text())
        self.c: dict[str, Any] = raw.get("text_config", raw)
        self.linear = self.c["linear_attn_config"]
        self.eps = self.c["rms_norm_eps"]
        self.latent_eps, self.length_eps = (self.eps, self.eps) if llamacpp else (1e-6, 1e-6)
        self.q8_inputs = q8_inputs
        self.w: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                self.w[name.removeprefix("language_model.")] = tensor

    def log_probs(self, tokens: list[int]) -> Tensor:
        """[T, vocab]: of the token after each prefix."""
        w, block = self.w, self.c.get("attn_res_block_size") or 0
        x_TD = w["model.embed_tokens.weight"].double()[tokens]
        banked: list[Tensor] = []
        for i in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            h = self.mix(banked, x_TD, f"{at}self_attention_res") if block and banked else x_TD
            start = bool(block) and i % block == 0
            if start:
                banked.append(x_TD)
            full = i + 1 in self.linear["full_attn_layers"]
            a = (self.mla if full else self.kda)(self.norm(h, f"{at}input_layernorm"), f"{at}self_attn.")
            x_TD = a if start else x_TD + a
            h = self.mix(banked, x_TD, f"{at}mlp_res") if block else x_TD
            x_TD = x_TD + self.ffn(self.norm(h, f"{at}post_attention_layernorm"), i)
        if block:
            x_TD = self.mix(banked, x_TD, "model.output_attn_res")
        head = w["model.embed_tokens.weight" if "lm_head.weight" not in w else "lm_head.weight"].double()
        return (self.norm(x_TD, "model.norm") @ head.T).log_softmax(-1)

    # ---------------------------------------------------------------- parts

    def lin(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].double().T

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.latent_eps if name.endswith(("q_a_layernorm", "kv_a_layernorm")) else self.eps
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * self.w[f"{name}.weight"].double()

    def mix(self, banked: list[Tensor], current: Tensor, site: str) -> Tensor:
        sources_JTD = torch.stack([*banked, current])
        scores_JT = self.lin(self.norm(sources_JTD, f"{site}_norm"), f"{site}_proj")[..., 0]
        return (scores_JT.softmax(0)[..., None] * sources_JTD).sum(0)

    def kda(self, x_TD: Tensor, at: str) -> Tensor:
        T, H, K = len(x_TD), self.c["num_attention_heads"], self.linear["head_dim"]
        q, k, v = (self.conv(self.lin(x_TD, f"{at}{p}_proj"), f"{at}{p}_conv1d.weight").view(T, H, K) for p in "qkv")
        q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + self.length_eps) for y in (q, k))
        z = self.lin(self.lin(x_TD, f"{at}f_a_proj"), f"{at}f_b_proj") + self.w[f"{at}dt_bias"].double()
        A_H1 = self.w[f"{at}A_log"].double()[:H].exp()[:, None]
        lower = self.linear.get("gate_lower_bound")
        z = z.view(T, H, K)
        g = -A_H1 * torch.log1p(z.exp()) if lower is None else lower / (1 + torch.exp(-A_H1 * z))
        beta_TH = torch.sigmoid(self.lin(x_TD, f"{at}b_proj"))
        state_HKV, out = torch.zeros(H, K, K, dtype=torch.float64), []
        for t in range(T):
            state_HKV = state_HKV * g[t].exp()[..., None]
            missing_HV = v[t] - torch.einsum("hkv,hk->hv", state_HKV, k[t])
            state_HKV = state_HKV + torch.einsum("hk,hv->hkv", k[t], beta_TH[t][:, None] * missing_HV)
            out.append(torch.einsum("hkv,hk->hv", state_HKV, q[t]) * K**-0.5)
        o = self.norm(torch.stack(out), f"{at}o_norm").reshape(T, -1)
        return self.lin(torch.sigmoid(self.lin(x_TD, f"{at}g_proj")) * o, f"{at}o_proj")

    def conv(self, x_TC: Tensor, name: str) -> Tensor:
        taps_CW = self.w[name].double()[:, 0]
        W = taps_CW.shape[1]
        padded = torch.cat([x_TC.new_zeros(W - 1, x_TC.shape[1]), x_TC])
        y = sum(padded[j : j + len(x_TC)] * taps_CW[:, j] for j in range(W))
        assert isinstance(y, Tensor)
        return y * torch.sigmoid(y)

    def mla(self, x_TD: Tensor, at: str) -> Tensor:
        c, T, H = self.c, len(x_TD), self.c["num_attention_heads"]
        nope, extra, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        if c.get("q_lora_rank"):
            q = self.lin(self.norm(self.lin(x_TD, f"{at}q_a_proj"), f"{at}q_a_layernorm"), f"{at}q_b_proj")
        else:
            q = self.lin(x_TD, f"{at}q_proj")
        q = q.view(T, H, nope + extra)
        latent, shared = self.lin(x_TD, f"{at}kv_a_proj_with_mqa").split([rank, extra], -1)
        kv = self.lin(self.norm(latent, f"{at}kv_a_layernorm"), f"{at}kv_b_proj").view(T, H, -1)
        k = torch.cat([kv[..., :nope], shared[:, None].expand(T, H, extra)], -1)
        scores = torch.einsum("thk,shk->hts", q, k) * (nope + extra) ** -0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
        o = torch.einsum("hts,shv->thv", scores.softmax(-1), kv[..., nope:]).reshape(T, -1)
        if c.get("mla_use_output_gate"):
            o = torch.sigmoid(self.lin(x_TD, f"{at}g_proj")) * o
        return self.lin(o, f"{at}o_proj")

    # ------------------------------------------------------------------ ffn

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        b1, b2 = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return b1 * torch.tanh(gate / b1) * torch.sigmoid(gate) * b2 * torch.tanh(up / b2)

    def glu(self, x: Tensor, at: str) -> Tensor:
        return self.lin(self.situ(self.lin(x, f"{at}gate_proj"), self.lin(x, f"{at}up_proj")), f"{at}down_proj")

    def ffn(self, x_TD: Tensor, layer: int) -> Tensor:
        c, at = self.c, f"model.layers.{layer}.block_sparse_moe."
        if f"{at}gate.weight" not in self.w:
            return self.glu(x_TD, f"model.layers.{layer}.mlp.")
        scores_TE = torch.sigmoid(self.lin(x_TD, f"{at}gate"))
        chosen = (scores_TE + self.w[f"{at}gate.e_score_correction_bias"].double()).topk(c["num_experts_per_token"])
        latent = bool(c.get("routed_expert_hidden_size"))
        inner = self.lin(x_TD, f"{at}routed_expert_down_proj") if latent else x_TD
        routed = torch.zeros_like(inner)
        for t in range(len(x_TD)):
            weights = scores_TE[t, chosen.indices[t]]
            if c.get("moe_renormalize", True):
                weights = weights / weights.sum()
            for e, p in zip(chosen.indices[t].tolist(), weights * c.get("routed_scaling_factor", 1.0), strict=True):
                routed[t] += p * self.expert(inner[t], f"{at}experts.{e}.")
        if latent and c.get("latent_moe_use_norm"):
            routed = self.norm(routed, f"{at}routed_expert_norm")
        y = self.lin(routed, f"{at}routed_expert_up_proj") if latent else routed
        return y + self.glu(x_TD, f"{at}shared_experts.") if c.get("num_shared_experts") else y

    def expert(self, x_D: Tensor, at: str) -> Tensor:
        x_D = self.seen(x_D)
        hidden = self.situ(self.weight(f"{at}w1") @ x_D, self.weight(f"{at}w3") @ x_D)
        return self.weight(f"{at}w2") @ self.seen(hidden)

    def weight(self, name: str) -> Tensor:
        """A plain weight, or MXFP4: low nibble the even column, bit 3 the sign, scale byte e worth 2^(e - 127)."""
        if f"{name}.weight" in self.w:
            return self.w[f"{name}.weight"].double()
        packed = self.w[f"{name}.weight_packed"].int()
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        values = torch.tensor([*GRID, *(-g for g in GRID)], dtype=torch.float64)[codes]
        scale = 2.0 ** (self.w[f"{name}.weight_scale"].double() - 127)
        return values * scale.repeat_interleave(32, -1)

    def seen(self, x_D: Tensor) -> Tensor:
        if not self.q8_inputs:
            return x_D
        blocks = x_D.view(-1, 32)
        step = (blocks.abs().amax(-1, keepdim=True) / 127).float()
        codes = torch.where(step > 0, torch.round(blocks / step.double()), 0.0)
        return (codes * step.half().double()).view(-1)
