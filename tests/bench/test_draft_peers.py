"""Exported drafts in real engines: a small llama, a draft that has learnt what it says, the same steps everywhere."""

from pathlib import Path

import pytest
import tiny
import torch

from nonet.bench import draft_llamacpp, draft_vllm
from nonet.bench.draft_vllm import Answer, by_position, compare
from nonet.draft.batch import observed
from nonet.draft.config import eagle3_config
from nonet.draft.export import export
from nonet.draft.loss import Teacher
from nonet.draft.model import Draft, started
from nonet.draft.train import TrainConfig, train_step
from nonet.model import Rope, hf
from nonet.model.optimizer import Optimizer
from nonet.types import UserError

LLAMA = dict(
    d_model=64, d_ff=96, heads=2, kv_heads=2, head_dim=32, layers=8, mixers=("gqa",) * 8, qk_norm=False, qkv_bias=False,
    o_bias=False, rope=Rope(theta=500.0), max_position=1024,
)  # fmt: skip
TOKENS, DRAFTED = 40, 4


@pytest.fixture(scope="module")
def learnt(nano, tmp_path_factory) -> tuple[Draft, Path, list[list[int]]]:
    """A random target, and a draft trained by heart on its greedy answers: it is right often, not always."""
    folder = tmp_path_factory.mktemp("target")
    target = tiny.model("gqa", vocab=nano.vocab_size, **LLAMA)
    hf.save(target, folder)
    hf.copy_tokenizer(nano.directory, folder)
    asked = [tiny.tokens(6 + i, vocab=nano.vocab_size, seed=i).tolist() for i in range(4)]
    ids = torch.arange(10, nano.vocab_size - 10)
    draft = started(eagle3_config(target.config, draft_vocab=len(ids)), target, ids)
    answers = draft_vllm.ours(draft, asked, TOKENS, 1)
    rows = [torch.tensor([[*ids, *a.tokens]]) for ids, a in zip(asked, answers, strict=True)]
    batches = [observed(target, draft.config.taps, row, torch.ones_like(row, dtype=torch.bool)) for row in rows]
    config = TrainConfig(loss="kl", unroll=3)
    optimizer = Optimizer(draft.named_parameters(), "adamw", 1e-2, (0.9, 0.95), 0.0, None)
    for _ in range(40):
        train_step(draft, Teacher(target, ids), optimizer, batches, 1e-2, config)
    return draft.eval(), folder, asked


@pytest.mark.timeout(1500)  # vLLM takes a minute to load, several on a busy machine
def test_the_same_steps_in_vllm(learnt, tmp_path):
    try:
        draft_vllm.python()
    except UserError as e:
        pytest.skip(str(e))
    draft, target, asked = learnt
    published = export(draft, target, tmp_path / "draft", "vllm", DRAFTED)
    other = draft_vllm.theirs(target, published, asked, TOKENS, DRAFTED)
    found = compare(draft.target, asked, draft_vllm.ours(draft, asked, TOKENS, DRAFTED), other, DRAFTED)
    assert all(p["gap"] < 1e-3 for p in found.parted)
    assert found.same_tokens >= 3 and found.same_steps == found.same_tokens
    assert found.ours == found.theirs and found.ours[1] > 0


def test_as_much_stands_in_llama_cpp(learnt):
    try:
        draft_llamacpp.python()
    except UserError as e:
        pytest.skip(str(e))
    draft, target, asked = learnt
    found = draft_llamacpp.counted(
        draft_vllm.ours(draft, asked, TOKENS, DRAFTED), draft_llamacpp.theirs(draft, target, asked, TOKENS, DRAFTED)
    )
    assert found.parted <= 1
    assert found.ours == found.theirs and sum(found.ours) > 0


def test_steps_are_counted_by_joint_prefix_without_the_prompts_own_and_the_last():
    answers = [Answer([0] * 9, [1, 3, 1, 2, 2]), Answer([0] * 7, [1, 5, 1])]
    assert by_position(answers, 4) == [3, 2, 1, 1]


def test_answers_that_part_are_told_with_the_gap_of_their_logits(learnt):
    draft, _, asked = learnt
    mine = draft_vllm.ours(draft, asked[:1], 8, 2)
    other = [Answer([*mine[0].tokens[:5], 11, 11, 11], mine[0].steps)]
    found = compare(draft.target, asked[:1], mine, other, 2)
    assert found.same_tokens == 0 and found.parted[0]["at"] == 5 and found.parted[0]["gap"] > 0
