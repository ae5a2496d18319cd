"""The mixers against their formulas in the Kimi K3 report, written out token by token and head by head."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional as F

from nonet.model import Model, ModelConfig
from nonet.model.attention import attend, attend_plain
from nonet.model.config import k3_mixers
from nonet.model.init import initialise
from nonet.model.kda import KDA
from nonet.model.span import Span
from nonet.ops.kda_prologue import decay

T = 21


def layer(mixer: str, **over) -> tuple[Model, Tensor]:
    """A one-layer model in float64 and an input for its mixer."""
    m = tiny.model("hybrid", dtype=torch.float64, layers=1, mixers=(mixer,), **over)
    return m, torch.randn(1, T, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


VARIANTS = {
    "k3": {},
    "kimi-linear": dict(decay="softplus", gate_rank=6),
    "no decay, no convolution": dict(decay="none", conv_kernel=1),
}


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_kda_is_its_definition(variant):
    """Linear, causal convolution, SiLU; unit keys and queries; decay, delta write, read; gated norm."""
    m, x = layer("kda", **VARIANTS[variant])
    a: KDA = m.layers[0].self_attn
    H, K, kernel = a.heads, a.dim, a.kernel
    with torch.no_grad():
        a.A_log.copy_(torch.linspace(-0.5, 0.8, H))
    states = [torch.zeros(K, K, dtype=torch.float64) for _ in range(H)]
    out = []
    for t in range(T):
        qkv = []
        for name in "qkv":
            taps = getattr(a, f"{name}_conv1d").weight[:, 0]
            past = [getattr(a, f"{name}_proj")(x[0, t - j]) if t - j >= 0 else 0.0 for j in range(kernel)]
            qkv.append(F.silu(sum(past[j] * taps[:, kernel - 1 - j] for j in range(kernel))).view(H, K))
        q, k, v = qkv
        beta = torch.sigmoid(a.b_proj(x[0, t]))
        z = (a.f_b_proj(a.f_a_proj(x[0, t])) + a.dt_bias).view(H, K)
        heads = []
        for h in range(H):
            qh, kh = (u[h] / math.sqrt(float(u[h] @ u[h]) + 1e-6) for u in (q, k))
            g = {
                "k3": -5.0 * torch.sigmoid(a.A_log[h].exp() * z[h]),
                "kimi-linear": -a.A_log[h].exp() * torch.log(1 + torch.exp(z[h])),
            }.get(variant, torch.zeros(K, dtype=torch.float64))
            S = torch.exp(g)[:, None] * states[h]
            S = S + beta[h] * torch.outer(kh, v[h] - S.T @ kh)
            states[h] = S
            heads.append(rms(S.T @ (qh / math.sqrt(K)), a.o_norm.weight, 1e-5))
        gate = a.g_b_proj(a.g_a_proj(x[0, t])) if variant == "kimi-linear" else a.g_proj(x[0, t])
        out.append(a.o_proj(torch.sigmoid(gate) * torch.cat(heads)))
    torch.testing.assert_close(a(x, Span(torch.arange(T)[None], None, None), None)[0], torch.stack(out))


@torch.no_grad()
def test_the_decay_stays_within_its_bound():
    m, x = layer("kda")
    for scale in (1, 1e3, -1e3):
        a = m.layers[0].self_attn
        g = decay(a.f_b_proj(a.f_a_proj(x * scale)) + a.dt_bias, a.A_log, a.floor)
        assert bool(((g >= -5) & (g <= 0)).all())


@torch.no_grad()
def test_mla_is_its_definition():
    """Compressed queries and keys, one shared extra key part that is never rotated, causal softmax, gate, no norm."""
    m, x = layer("mla")
    a, c = m.layers[0].self_attn, m.config
    n, r, v_dim, R = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
    q = a.q_b_proj(rms(a.q_a_proj(x[0]), a.q_a_layernorm.weight)).view(T, c.heads, n + r)
    compressed = a.kv_a_proj_with_mqa(x[0])
    kv = a.kv_b_proj(rms(compressed[:, :R], a.kv_a_layernorm.weight)).view(T, c.heads, n + v_dim)
    out = torch.zeros(T, c.heads, v_dim, dtype=torch.float64)
    for h in range(c.heads):
        for t in range(T):
            scores = torch.stack(
                [
                    (q[t, h, :n] @ kv[s, h, :n] + q[t, h, n:] @ compressed[s, R:]) / math.sqrt(n + r)
                    for s in range(t + 1)
                ]
            )
            out[t, h] = scores.softmax(0) @ kv[: t + 1, h, n:]
    expected = a.o_proj(torch.sigmoid(a.g_proj(x[0])) * out.reshape(T, -1))
    torch.testing.assert_close(a(x, Span(torch.arange(T)[None], None, None), None)[0], expected)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", "situ"])
def test_the_feed_forward_is_its_definition_and_situ_saturates(activation):
    m, x = layer("mla", activation=activation)
    f = m.layers[0].mlp
    for scale in (1.0, 1e4):
        gate, up = f.gate_proj(scale * x), f.up_proj(scale * x)
        if activation == "silu":
            inner = gate * torch.sigmoid(gate) * up
        else:
            inner = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
            assert inner.abs().max() <= 100
        torch.testing.assert_close(f(scale * x), f.down_proj(inner))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 8, 9, 20])
def test_plain_attention_is_the_fused_kernel(groups, queries):
    """The fast path for few queries and its twin, with grouped keys and a ragged mask."""
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, queries, 6, generator=gen, dtype=torch.float64)
    k, v = (torch.randn(2, groups, 30, 6, generator=gen, dtype=torch.float64) for _ in range(2))
    ends = torch.tensor([[25], [9]]) + torch.arange(queries)
    mask = (torch.arange(30) <= ends[:, :, None]).unsqueeze(1)
    span = Span(ends, None, None, mask_B1TL=mask)
    fused = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, span, 0.3), fused)
    torch.testing.assert_close(attend_plain(q, k, v, mask, 0.3), fused)


def test_initialisation_is_a_function_of_the_seed_and_leaves_nothing_out():
    def made(seed: int) -> dict[str, Tensor]:
        m = Model(ModelConfig(vocab_size=40, **tiny.HYBRID, mtp_layers=1))
        with torch.no_grad():
            for p in m.parameters():
                p.fill_(math.nan)
        return initialise(m, seed).state_dict()

    one, same, other = made(0), made(0), made(1)
    assert all(bool(p.isfinite().all()) for p in one.values())
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not torch.equal(one["embed_tokens.weight"], other["embed_tokens.weight"])
    assert bool(((one["layers.0.self_attn.dt_bias"] < 0) & (one["layers.0.self_attn.dt_bias"] > -8)).all())


def test_the_layer_map_of_k3():
    """69 KDA and 24 MLA layers of 93; the last two are both MLA, which a plain every-fourth rule gets wrong."""
    mixers = k3_mixers(93)
    assert (mixers.count("kda"), mixers.count("mla")) == (69, 24)
    assert [i + 1 for i, m in enumerate(mixers) if m == "mla"] == [*range(4, 93, 4), 93]
    assert k3_mixers(4) == ("kda", "kda", "kda", "mla")
