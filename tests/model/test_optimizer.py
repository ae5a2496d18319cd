"""The optimiser: who is trained how, Muon against torch's own, heads and experts by themselves, exact state."""

from __future__ import annotations

import copy
import io

import pytest
import tiny
import torch
from torch import Tensor, nn

from nonet.lm.trainer import Row, losses
from nonet.model import Model
from nonet.model.optimizer import Muon, Optimizer, Unit, head_counts, orthogonalise, rule_of, split

KINDS = sorted(tiny.KINDS)
ADAM = ("embed_tokens", "lm_head", "norm.", "bias", "conv1d", "A_log", "_res.proj", "mlp.gate.")


def whole(kind: str) -> Model:
    return tiny.model(kind, mtp_layers=1)


# ------------------------------------------------------------------------------------ who


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_trainable_parameter_is_in_exactly_one_group(kind, optimizer):
    m = whole(kind)
    groups = split(m.named_parameters(), optimizer, head_counts(m))
    found = [id(p) for p in groups.parameters]
    assert sorted(found) == sorted(id(p) for p in m.parameters() if p.requires_grad)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_split_is_k3s(kind):
    m = whole(kind)
    groups = split(m.named_parameters(), "muon", head_counts(m))
    muon = {u.name for u in groups.muon}
    for name, p in m.named_parameters():
        assert (name in muon) == (p.requires_grad and not any(part in name for part in ADAM))
    plain = {n for n, _ in groups.plain}
    kept = ("norm.weight", "bias", "A_log", "_res.proj.weight")
    assert plain == {n for n, p in m.named_parameters() if p.requires_grad and n.endswith(kept)}


def test_units_are_heads_experts_and_whole_matrices():
    m = whole("k3")
    c, moe = m.config, m.config.moe
    units = {u.name: (u.blocks, u.rows, u.columns) for u in split(m.named_parameters(), "muon", head_counts(m)).muon}
    assert units["layers.0.self_attn.k_proj.weight"] == (c.heads, c.kda_head_dim, c.d_model)
    assert units["layers.3.self_attn.q_b_proj.weight"] == (
        c.heads, c.qk_nope_head_dim + c.qk_rope_head_dim, c.q_lora_rank,
    )  # fmt: skip
    assert units["layers.3.self_attn.kv_b_proj.weight"] == (c.heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
    assert units["layers.3.self_attn.kv_a_proj_with_mqa.weight"][0] == 1
    assert units["layers.1.mlp.experts.w1"] == (moe.experts, moe.d_ff, moe.latent)
    assert units["layers.1.mlp.experts.w2"] == (moe.experts, moe.latent, moe.d_ff)
    assert units["layers.0.mlp.up_proj.weight"] == (1, c.d_ff, c.d_model)
    assert units["mtp.block.self_attn.kv_b_proj.weight"][0] == c.heads


def test_grouped_keys_divide_into_their_own_number_of_heads():
    m = whole("gqa")
    units = {u.name: u.blocks for u in split(m.named_parameters(), "muon", head_counts(m)).muon}
    assert units["layers.0.self_attn.q_proj.weight"] == 4
    assert units["layers.0.self_attn.k_proj.weight"] == units["layers.0.self_attn.v_proj.weight"] == 2
    direct = whole("kimi_linear")
    units = {u.name: u.blocks for u in split(direct.named_parameters(), "muon", head_counts(direct)).muon}
    assert units["layers.3.self_attn.q_proj.weight"] == 4


@pytest.mark.parametrize("name", ["layers.0.self_attn.sink", "layers.0.mlp.new_proj.weight", "gateway.weight", "w1"])
def test_a_parameter_that_no_rule_names_is_an_error(name):
    with pytest.raises(AssertionError, match="no rule"):
        rule_of(name)
    with pytest.raises(AssertionError, match="no rule"):
        Optimizer([(name, nn.Parameter(torch.zeros(2, 2)))], "muon", 1e-3, (0.9, 0.95), 0.1)


def test_a_parameter_named_twice_is_an_error():
    p = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="named twice"):
        split([("a.o_proj.weight", p), ("b.o_proj.weight", p)], "muon")


# ------------------------------------------------------------------------------------ Muon


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (7, 96)])
def test_muon_on_whole_matrices_is_torchs(shape):
    """Same momentum to the last bit; weights within what bfloat16 products may round differently."""
    ours, theirs = (nn.Parameter(random(*shape)) for _ in range(2))
    muon = Muon([Unit("w", ours, 1, *shape)], weight_decay=0.1)
    peer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        before = theirs.detach().clone()
        ours.grad, theirs.grad = random(*shape, seed=step), random(*shape, seed=step)
        muon.step(0.02)
        peer.step()
        moved = (theirs - before).abs().max()
        assert torch.equal(muon.momentum["w"], peer.state[theirs]["momentum_buffer"])
        assert (ours - theirs).abs().max() <= 0.02 * moved * (step + 1)


def test_a_stack_is_its_matrices_one_by_one():
    x = random(5, 12, 20)
    together = orthogonalise(x)
    for i in range(5):
        torch.testing.assert_close(together[i], orthogonalise(x[i : i + 1])[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(orthogonalise(x.mT), together.mT, rtol=0, atol=0)


def test_orthogonalising_flattens_the_singular_values():
    spread = torch.linalg.svdvals(random(3, 16, 48) * torch.logspace(0, 1.5, 16).unsqueeze(1))
    flat = torch.linalg.svdvals(orthogonalise(random(3, 16, 48) * torch.logspace(0, 1.5, 16).unsqueeze(1)).float())
    assert spread.max() / spread.min() > 15
    assert flat.min() > 0.5 and flat.max() < 1.35


def test_a_loud_head_does_not_drown_a_quiet_one():
    """Per head, both move equally far; in one matrix the quiet head's singular values stay at the noise floor."""
    gradient = torch.cat([random(8, 64) * 1e3, random(8, 64, seed=1) * 1e-3])
    moved = {}
    for blocks in (1, 2):
        p = nn.Parameter(torch.zeros(16, 64))
        p.grad = gradient.clone()
        Muon([Unit("q", p, blocks, 16 // blocks, 64)], 0.0).step(1.0)
        loud, quiet = p.detach().split(8)
        moved[blocks] = float(quiet.norm() / loud.norm())
    assert moved[1] < 0.05 and 0.9 < moved[2] < 1.1


def test_an_expert_nobody_chose_stands_still_but_for_decay():
    p = nn.Parameter(torch.ones(3, 8, 4))
    p.grad = random(3, 8, 4)
    p.grad[1] = 0
    Muon([Unit("experts.w1", p, 3, 8, 4)], 0.1).step(0.5)
    torch.testing.assert_close(p.detach()[1], torch.full((8, 4), 0.95))
    assert not torch.allclose(p.detach()[0], p.detach()[1])


# ------------------------------------------------------------------------------------ together


def train(m: Model, optimizer: Optimizer, steps: range) -> None:
    m.train()
    for step in steps:
        rows = [Row(tiny.tokens(12, seed=2 * step + i).tolist(), [True] * 12) for i in range(2)]
        loss, mtp = losses(m, rows, True)
        assert mtp is not None
        (loss + mtp).backward()
        optimizer.step(1e-2, 1.0)
        m.balance_()


def made(m: Model, kind: str = "muon") -> Optimizer:
    return Optimizer(m.named_parameters(), kind, 1e-2, (0.9, 0.95), 0.1, head_counts(m))


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_saved_and_loaded_it_continues_to_the_last_bit(kind):
    straight = whole("k3")
    optimizer = made(straight, kind)
    train(straight, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(straight, optimizer, range(3, 5))

    file.seek(0)
    blob = torch.load(file, weights_only=True)
    resumed = tiny.model("k3", mtp_layers=1, seed=5)
    resumed.load_state_dict(blob["model"])
    again = made(resumed, kind)
    again.load_state_dict(blob["optimizer"])
    train(resumed, again, range(3, 5))
    for name, p in resumed.state_dict().items():
        assert torch.equal(p, straight.state_dict()[name]), name


def test_state_of_another_model_is_refused():
    with pytest.raises(ValueError, match="other parameters"):
        made(whole("hybrid")).muon.load_state_dict(made(whole("k3")).muon.state_dict())


def test_parameters_without_gradient_are_left_alone():
    m = whole("k3")
    before = copy.deepcopy(m.state_dict())
    optimizer = made(m)
    m.embed_tokens.weight.sum().backward()
    optimizer.step(1e-2, 1.0)
    moved = {n for n, p in m.state_dict().items() if not torch.equal(p, before[n])}
    assert moved == {"embed_tokens.weight", "lm_head.weight"}  # tied: one tensor, two names


def test_vectors_are_not_decayed():
    m = whole("k3")
    before = copy.deepcopy(m.state_dict())
    optimizer = made(m)
    for p in m.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step(0.5, 1.0)
    for name, p in m.named_parameters():
        shrinks = p.requires_grad and not name.endswith(("norm.weight", "bias", "A_log", "_res.proj.weight"))
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if shrinks else 1.0))


def test_the_norm_it_returns_is_the_gradients_before_clipping():
    m = whole("hybrid")
    optimizer = made(m)
    loss, _ = losses(m, [Row(tiny.tokens(9).tolist(), [True] * 9)], False)
    loss.backward()
    square = sum(float(p.grad.square().sum()) for p in m.parameters() if p.grad is not None)
    assert optimizer.step(1e-3, 1e-3) == pytest.approx(square**0.5, rel=1e-5)
    assert all(p.grad is None for p in m.parameters())
