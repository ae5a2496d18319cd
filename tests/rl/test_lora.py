"""LoRA in the learner: exact factor gradients, merged weights everywhere, PEFT directories in and out."""

from __future__ import annotations

import copy
import json
from typing import Any

import made
import pytest
import tiny
import torch
from torch.func import functional_call
from updates import ONE, scored

from nonet.engine import Engine
from nonet.model import Model, hf
from nonet.model import peft as format
from nonet.rl import Loop, RLConfig
from nonet.rl.batch import Scored
from nonet.rl.learner import Learner, scores
from nonet.rl.lora import A, B, LoraConfig
from nonet.rl.objective import Tokens
from nonet.rl.packing import pack
from nonet.run import Run
from nonet.types import Request, Sampling, Segment, Trajectory, UserError

SMALL = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj"))
LLAMA: dict[str, Any] = dict(qk_norm=False, o_bias=False, qkv_bias=False, tie_embeddings=False, rope=tiny.Rope())


@pytest.fixture(scope="module")
def m() -> Model:
    return tiny.model("gqa", mtp_layers=0, **LLAMA)


def learner(m: Model, lora: LoraConfig = SMALL, **over) -> Learner:
    return Learner(copy.deepcopy(m), RLConfig(**{**ONE, "lora": lora, **over}))


def trained(m: Model, steps: int = 2, lora: LoraConfig = SMALL) -> Learner:
    out = learner(m, lora)
    for _ in range(steps):
        out.step(pack(scored(m, drift=0.2)))
    return out


def test_at_the_start_nothing_is_added_and_afterwards_only_the_targets_move_by_low_rank(m):
    before = {n: p.clone() for n, p in m.named_parameters()}
    assert all(torch.equal(before[n], p) for n, p in learner(m).model.named_parameters())
    after = dict(trained(m).model.named_parameters())
    moved = {n for n, p in after.items() if not torch.equal(before[n], p)}
    assert moved == {n for n in before if n.endswith(("q_proj.weight", "down_proj.weight"))}
    for n in moved:
        assert torch.linalg.matrix_rank((after[n] - before[n]).double(), atol=1e-5) <= SMALL.rank


def test_factor_gradients_are_those_of_a_forward_through_the_factors(m):
    """Autograd through W0 + s B A, against s B^T G and s G A^T."""
    one = trained(m, 1)  # so that B is not zero
    lora = one.lora
    assert lora is not None
    batch = pack(scored(m, drift=0.2))
    leaves = {n: p.detach().clone().requires_grad_() for n, p in lora.factors.items()}
    weights = {f"{n}.weight": w + lora.scale * leaves[n + B] @ leaves[n + A] for n, w in lora._base.items()}
    part = batch.part(range(8))
    through = Functional(one.model, weights)
    logp_N, _ = scores(through, part, 1.0)  # type: ignore[arg-type]
    index_N = part.index_N
    tokens = Tokens(logp_N, batch.behaviour_T[index_N], batch.advantage_T[index_N], part.row_N)
    (one.objective(tokens) / batch.trained_tokens).backward()
    found: dict[str, torch.Tensor] = {}
    one.optimizer.step = lambda lr, clip: found.update({n: p.grad for n, p in lora.factors.items()}) or 0.0  # type: ignore
    one.step(batch)
    assert found.keys() == leaves.keys()
    for n, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(found[n], leaf.grad, rtol=1e-3, atol=1e-3 * float(leaf.grad.abs().max()))


class Functional:
    """A model whose forward and logits use other weights."""

    def __init__(self, model: Model, weights: dict[str, torch.Tensor]):
        self.model, self.weights = model, weights

    def __call__(self, tokens_BT: torch.Tensor, **options: Any) -> torch.Tensor:
        return functional_call(self.model, self.weights, (tokens_BT,), options)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden)


def test_only_the_factors_have_an_optimisers_state(m):
    state = trained(m, 1).optimizer.state_dict()[0]["state"]
    kept = sum(x.numel() for s in state.values() for x in s.values() if x.ndim)
    factors = learner(m).lora
    assert factors is not None
    assert kept == 2 * sum(p.numel() for p in factors.factors.values())


def test_what_the_engine_samples_after_an_update_scores_at_ratio_one(m):
    """The merged weights are what both sides compute with."""
    one = trained(m)
    engine = Engine(one.model, version=one.version)
    engine.load(one.version)
    engine.submit(Request("0", (5, 6, 7), 12, sampling=Sampling(seed=1)))
    (c,) = engine.run()
    t = Trajectory("t", 0, 0, [Segment("prompt", (5, 6, 7))], status="done")
    t.append(Segment("policy", c.tokens, c.logprobs, c.raw_logprobs, c.policy_version))
    one.config = one.config.model_copy(update={"check_ratio": 1e-4})
    stats = one.step(pack([Scored.uniform(t, 1.0)]))
    assert stats["stale"] == 0
    assert max(abs(stats[k] - 1) for k in ("ratio_min", "ratio_max")) < 1e-4


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_saved_adapter_merged_into_its_base_is_the_trained_model(kind, tmp_path):
    m = tiny.model(kind, mtp_layers=0, tie_embeddings=False)
    one = trained(m, 1, LoraConfig(rank=2, alpha=3.0, targets=("o_proj", "down_proj", "lm_head")))
    assert one.lora is not None
    one.lora.save(tmp_path, base="elsewhere")
    again = copy.deepcopy(m)
    format.merge(again, tmp_path)
    for (n, a), (_, b) in zip(again.named_parameters(), one.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=n)


def test_peft_itself_says_what_we_say_and_we_go_on_from_what_it_saved(m, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    from transformers import AutoModelForCausalLM

    base, ours, theirs = (tmp_path / n for n in ("base", "ours", "theirs"))
    hf.save(m, base)
    one = trained(m)
    assert one.lora is not None
    one.lora.save(ours, base)
    wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ours)
    with torch.no_grad():
        x = tiny.tokens(2, 9)
        torch.testing.assert_close(one.model.logits(one.model(x)), wrapped.eval()(x).logits, rtol=1e-4, atol=1e-4)
    wrapped.save_pretrained(theirs)
    assert set(json.loads((theirs / format.CONFIG).read_text())["target_modules"]) == set(SMALL.targets)
    more = learner(m, SMALL.model_copy(update={"start": str(theirs)}))
    for (n, a), (_, b) in zip(one.model.named_parameters(), more.model.named_parameters(), strict=True):
        assert torch.equal(a, b), n
    assert more.step(pack(scored(m)))["updates"] == 1


def test_a_run_continues_from_its_factors_bit_for_bit(policy, nano, tmp_path):
    def run(out, steps: int) -> Loop:
        config = RLConfig(
            steps=steps, groups=2, samples=3, fraction=1.0, max_tokens=24, warmup=0, lr=1e-2, save_every_s=0,
            lora=LoraConfig(rank=2, targets=("o_proj",)),
        )  # fmt: skip
        loop = Loop(copy.deepcopy(policy), tiny.setting(nano, rewards={"varied": tiny.varied}), config, Run(out), 2)
        loop.fit()
        return loop

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    parts = run(tmp_path / "parts", 4)
    assert whole.learner.lora is not None and parts.learner.lora is not None
    assert any(bool(p.any()) for n, p in whole.learner.lora.factors.items() if n.endswith(B))
    assert all(torch.equal(p, parts.learner.lora.factors[n]) for n, p in whole.learner.lora.factors.items())
    other = parts.learner.model.state_dict()
    assert all(torch.equal(p, other[n]) for n, p in whole.learner.model.state_dict().items())


@pytest.mark.parametrize(
    ("over", "sentence"),
    [
        ({"targets": ("q_porj",)}, "rl.lora.targets: 'q_porj': the model has no such linear layer; it has"),
        ({"rank": 4}, "rl.lora.rank, rl.lora.alpha = 4, 6: the adapter in"),
        ({"targets": ("q_proj",)}, "has other layers (layers.0.mlp.down_proj.lora_A.weight); name the same"),
    ],
)
def test_mistakes_are_one_sentence(m, tmp_path, over, sentence):
    one = trained(m, 1)
    assert one.lora is not None
    one.lora.save(tmp_path, "elsewhere")
    with pytest.raises(UserError) as caught:
        learner(m, SMALL.model_copy(update={"start": str(tmp_path), **over}))
    assert sentence in str(caught.value)


def test_a_tied_head_is_refused(m):
    tied = tiny.model("gqa", mtp_layers=0, **{**LLAMA, "tie_embeddings": True})
    with pytest.raises(UserError, match="embedding table too"):
        learner(tied, LoraConfig(targets=("lm_head",)))


def test_an_attempt_made_better_by_the_factors_alone(m):
    good, bad = (made.written_by(m, made.trajectory(0, i, [("prompt", 3), ("policy", 6)])) for i in range(2))
    one = learner(m)
    for _ in range(5):
        one.step(pack([Scored.uniform(good, 1.0), Scored.uniform(bad, -1.0)]))
    now = [sum(made.written_by(one.model, copy.deepcopy(t)).segments[1].logprobs) for t in (good, bad)]
    then = [sum(t.segments[1].logprobs) for t in (good, bad)]
    assert now[0] > then[0] and now[1] < then[1]
