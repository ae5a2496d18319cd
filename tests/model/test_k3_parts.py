"""What K3 adds to Kimi-Linear, and Kimi-Linear's own variants, against their formulas written out (k3 section 1)."""

from __future__ import annotations

import pytest
import tiny
import torch
from torch import Tensor

from nonet.model import Model, ModelConfig
from nonet.model.init import initialise
from nonet.model.moe import MoE


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def mixture(site, sources: list[Tensor]) -> Tensor:
    scores = torch.stack([(rms(v, site.norm.weight) * site.proj.weight[0]).sum(-1) for v in sources])
    return (scores.softmax(0).unsqueeze(-1) * torch.stack(sources)).sum(0)


@torch.no_grad()
def test_attention_residuals_follow_k3s_schedule():
    """Steps 1 to 4 of k3 section 1.4: banked block sums, no ordinary residual, one last mixture before the norm."""
    m = tiny.model("k3", dtype=torch.float64, layers=7, attn_res_block=3)
    tokens = tiny.tokens(2, 9)
    span = m.span(tokens)
    banked: list[Tensor] = []
    running: Tensor | None = m.embed_tokens(tokens)
    for i, layer in enumerate(m.layers):
        assert running is not None
        h = mixture(layer.self_attention_res, [*banked, running]) if banked else running
        if i % 3 == 0:
            banked.append(running)
            running = None
        a = layer.self_attn(rms(h, layer.input_layernorm.weight), span, None)
        running = a if running is None else running + a
        h = rms(mixture(layer.mlp_res, [*banked, running]), layer.post_attention_layernorm.weight)
        running = running + (layer.mlp(h, None) if isinstance(layer.mlp, MoE) else layer.mlp(h))
    assert len(banked) == 3  # embedding, layers 0..2, layers 3..5; layer 6 is the open block
    torch.testing.assert_close(m(tokens), mixture(m.output_attn_res, [*banked, running]))


def test_fresh_queries_mix_evenly():
    """Queries start at zero, so at first every site reads the plain mean of its sources."""
    m = initialise(Model(ModelConfig(vocab_size=61, **tiny.K3)), 0)
    sites = [s for layer in m.layers for s in (layer.self_attention_res, layer.mlp_res)] + [m.output_attn_res]
    assert all(not bool(s.proj.weight.any()) for s in sites)
    sources = [torch.full((1, 1, 32), float(v)) for v in (1, 2, 6)]
    torch.testing.assert_close(sites[0](sources), torch.full((1, 1, 32), 3.0))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["k3", "kimi_linear"])
def test_the_mixture_of_experts_is_its_definition(kind):
    """Bias chooses and never weighs; the latent norm acts once, on the weighted sum; shared experts see full width."""
    m = tiny.model(kind, dtype=torch.float64)
    moe, c = m.layers[2].mlp, m.config.moe
    x = torch.randn(1, 11, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    out = []
    for t in range(11):
        s = torch.sigmoid(moe.gate.weight.double() @ x[0, t])
        chosen = sorted(range(c.experts), key=lambda e: -float(s[e] + moe.gate.e_score_correction_bias[e]))[: c.top_k]
        z = moe.routed_expert_down_proj(x[0, t]) if c.latent else x[0, t]
        u = 0
        for e in chosen:
            inner = moe.experts.act(moe.experts.w1[e] @ z, moe.experts.w3[e] @ z)
            u = u + s[e] / sum(s[j] for j in chosen) * c.scale * (moe.experts.w2[e] @ inner)
        if c.latent:
            u = moe.routed_expert_up_proj(rms(u, moe.routed_expert_norm.weight))
        out.append(u + moe.shared_experts(x[0, t]))
    torch.testing.assert_close(moe(x, None)[0], torch.stack(out))


def test_kimi_linear_has_a_low_rank_gate_and_plain_ungated_mla():
    m = tiny.model("kimi_linear")
    a = m.layers[0].self_attn
    assert not hasattr(a, "g_proj") and a.g_b_proj.weight.shape == (32, 8)
    mla = m.layers[3].self_attn
    assert not hasattr(mla, "q_a_proj") and not hasattr(mla, "g_proj")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["k3", "kimi_linear", "gqa"])
def test_packed_documents_are_what_they_are_alone(kind):
    """No attention, convolution, KDA state or position crosses from one document to the next."""
    m = tiny.model(kind, dtype=torch.float64, mtp_layers=1)
    lengths = [7, 1, 19, 2]
    documents = [tiny.tokens(1, n, seed=n) for n in lengths]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    packed = m(torch.cat(documents, 1), starts=starts)[0]
    alone = torch.cat([m(d)[0] for d in documents])
    torch.testing.assert_close(packed, alone)
    mtp = m.mtp_logits(torch.cat(documents, 1), packed[None], starts=starts)[0]
    for start, d in zip(starts, documents, strict=True):
        if d.shape[1] > 1:
            inside = slice(start, start + d.shape[1] - 1)
            torch.testing.assert_close(mtp[inside], m.mtp_logits(d, m(d))[0])


def test_impossible_starts_are_refused():
    m = tiny.model("k3")
    for starts in ([], [1], [0, 5, 5], [0, 9]):
        with pytest.raises(ValueError, match="must ascend from 0"):
            m(tiny.tokens(1, 9), starts=starts)
    with pytest.raises(ValueError, match="one fresh row"):
        m(tiny.tokens(2, 9), starts=[0])


@torch.no_grad()
def test_the_mtp_layer_ignores_the_first_rows_embedding():
    """Public engines zero it (k3 section 3.2b), so training does as well."""
    m = tiny.model("k3", mtp_layers=1)
    tokens, hidden = tiny.tokens(1, 6), torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[0, 1] = (other[0, 1] + 1) % 61
    assert torch.equal(m.mtp_logits(tokens, hidden)[:, 0], m.mtp_logits(other, hidden)[:, 0])
    assert not torch.equal(m.mtp_logits(tokens, hidden)[:, 1:], m.mtp_logits(tokens.flip(1), hidden)[:, 1:])


def test_the_mtp_block_is_a_backbone_block_without_attention_residuals():
    m = tiny.model("k3", mtp_layers=1)
    assert isinstance(m.mtp.block.mlp, MoE) and m.mtp.block.self_attention_res is None
    backbone = {n: p.shape for n, p in m.layers[-1].named_parameters() if "_res." not in n}
    assert {n: p.shape for n, p in m.mtp.block.named_parameters()} == backbone


def test_rope_in_mla_tells_order():
    """The variant that NoPE is compared with."""
    m = tiny.model("hybrid", layers=1, mixers=("mla",), mla_rope=dict(theta=100.0), dtype=torch.float64)
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    with torch.no_grad():
        one, two = (m.layers[0].self_attn(y, m.span(tiny.tokens(1, 6)), None)[0, -1] for y in (x, swapped))
        assert not torch.allclose(one, two)
