"""OPD as a credit: who is asked what, and what becomes of the answers."""

from __future__ import annotations

import copy

import made
import pytest
import tiny
import torch
from distilling import CELLS, Told, attempt, credit, setting

from nonet.engine.scoring import score
from nonet.model import hf
from nonet.rl.distill import DistillConfig, Experts
from nonet.rl.packing import pack
from nonet.rl.served import ServedTeacher
from nonet.rl.teacher import LocalTeacher, passage, teacher_prompt
from nonet.types import UserError


@pytest.fixture
def s(nano):
    return setting(nano)


def everyone(teacher) -> dict:
    return dict.fromkeys(CELLS, teacher)


def student_of(t) -> list[float]:
    return [x for seg in t.segments for x in seg.logprobs]


# --------------------------------------------------------------------- what a teacher reads


def test_its_prompt_lacks_the_effort_message_and_the_response_aligns_by_offset(s, policy):
    """The student was told "low", the teacher is the low expert and was not: their prompts differ in length."""
    t = attempt(s, policy, 0, parts=[("policy", 4), ("tool", 3), ("policy", 2)])
    teacher = Told(lambda k: -10.0 - k)
    (scored, _) = credit(s, policy, everyone(teacher), r_max=1e9)([[t, attempt(s, policy, 0, 1)]])
    (asked, _) = teacher.asked
    own = t.segments[0].tokens
    assert len(own) > asked.first and s.tokenizer.decode(own).replace("low", "", 1) != s.tokenizer.decode(own)
    assert "low" not in s.tokenizer.decode(asked.tokens[: asked.first])
    assert asked.tokens[asked.first :] == t.tokens[len(own) :]
    at = [0, 1, 2, 3, 7, 8]  # in the response; 4, 5, 6 are the tool's
    assert scored.advantages == pytest.approx([-10.0 - k - x for k, x in zip(at, student_of(t), strict=True)])


def test_it_may_be_told_the_effort_all_the_same(s, policy):
    t, teacher = attempt(s, policy, 0), Told()
    credit(s, policy, everyone(teacher), teacher_effort=True)([[t, attempt(s, policy, 0, 1)]])
    assert teacher.asked[0] == passage(t)


def test_each_task_has_the_teacher_of_its_domain_and_effort(nano, policy):
    s = setting(nano, efforts=("low", "max"))
    cells = {(d, e): Told(where=f"{d}:{e}") for d in ("agents", "general") for e in ("low", "max")}
    groups = [[attempt(s, policy, g, k) for k in range(2)] for g in range(12)]
    credit(s, policy, cells)(groups)
    tasks = {g: s.task("train", g) for g in range(12)}
    assert len({(t.domain, t.effort) for t in tasks.values()}) == 4
    for (domain, effort), teacher in cells.items():
        mine = [g for g, t in tasks.items() if (t.domain, t.effort) == (domain, effort)]
        assert [p.tokens[p.first :] for p in teacher.asked] == [
            t.tokens[len(t.segments[0].tokens) :] for g in mine for t in groups[g]
        ]


def test_it_is_asked_at_the_students_temperature(s, policy, policy_directory):
    """verl#5592."""
    t = attempt(s, policy, 0)
    told = Told()
    credit(s, policy, everyone(told), temperature=0.6)([[t, attempt(s, policy, 0, 1)]])
    assert told.temperatures == {0.6}
    found = LocalTeacher(policy_directory, credit(s, policy, {}).experts.seat).logprobs([passage(t)], 0.6)
    with torch.no_grad():
        logp = (policy.logits(policy(torch.tensor([t.tokens])))[0] / 0.6).log_softmax(-1)
    first = len(t.segments[0].tokens)
    assert found[0] == pytest.approx([float(logp[i - 1, t.tokens[i]]) for i in range(first, len(t.tokens))], abs=1e-4)


# --------------------------------------------------------------------- what a token is worth


def test_a_tools_tokens_are_neither_paid_nor_counted_as_distance(s, policy):
    """slime#1370: KL on tool tokens accumulates in returns."""
    t = attempt(s, policy, 0, parts=[("policy", 1), ("tool", 3), ("policy", 1)])
    huge = Told(lambda k: -1.0 if k in (0, 4) else 1e9)
    for discount in (0.0, 0.5, 1.0):
        (scored, *_) = credit(s, policy, everyone(huge), discount=discount, r_max=1e9)([[t, attempt(s, policy, 0, 1)]])
        first, last = (-1.0 - x for x in student_of(t))
        assert scored.advantages == pytest.approx([first + discount * last, last])
    assert not pack([scored]).mask_T[-4:-1].any()


def test_each_tokens_reward_is_clipped_before_it_is_summed(s, policy):
    t = attempt(s, policy, 0, parts=[("policy", 3)])
    far = Told(lambda k: student_of(t)[k] + (3.0, -90.0, 0.25)[k])
    opd = credit(s, policy, everyone(far), discount=1.0, r_max=2.0, student="behaviour")
    (scored, _) = opd([[t, attempt(s, policy, 0, 1, parts=[("policy", 3)])]])
    assert scored.advantages == pytest.approx([0.25, -1.75, 0.25])
    assert opd.explain(t) == {"teacher_log_ratio": pytest.approx([3.0, -90.0, 0.25])}
    assert opd.explain(attempt(s, policy, 5)) == {}


def test_the_share_that_was_clipped_is_reported(s, policy):
    opd = credit(s, policy, everyone(Told(lambda k: 0.0 if k < 2 else -1000.0)), r_max=500.0)
    opd([[attempt(s, policy, g, k) for k in range(2)] for g in range(4)])
    assert opd.figures["opd_clipped"] == 3 / 5
    cells = opd.figures["opd_experts"]
    assert sum(c["tokens"] for c in cells.values()) == 4 * 2 * 5
    total = sum(c["kl"] * c["tokens"] for c in cells.values()) / 40
    assert opd.figures["opd_kl"] == pytest.approx(total) and total > 500


def test_siblings_do_not_matter(s, policy):
    """SkyRL PR#2256: normalising over the batch would z-score the teacher's signal away."""
    t = attempt(s, policy, 0)
    worth = []
    for others in ([[]], [[attempt(s, policy, g, k) for k in range(2)] for g in range(1, 4)]):
        groups = [[t, attempt(s, policy, 0, 1)], *filter(None, others)]
        worth.append(credit(s, policy, everyone(Told()))(groups)[0].advantages)
    assert worth[0] == worth[1]
    always_better = credit(s, policy, everyone(Told(lambda k: 5.0)), r_max=1e9)([[t, attempt(s, policy, 0, 1)]])
    assert all(a > 0 for scored in always_better for a in scored.advantages)


def test_equal_outcomes_and_cut_attempts_are_trained_and_broken_ones_are_not(s, policy):
    """trl#6367: a dense reward needs no variance among siblings; nothing of it is lost to a budget."""
    members = [attempt(s, policy, 0, k, rewards={"r": 1.0}) for k in range(3)]
    members[1].stop_reason = "length"
    members[2].status, members[2].stop_reason = "failed", "sandbox: OSError: gone"
    scored = credit(s, policy, everyone(Told()), samples=3)([members])
    assert [x.trajectory.sample for x in scored] == [0, 1]


def test_an_outcome_is_added_with_its_weight(s, policy):
    members = [attempt(s, policy, 0, k, rewards={"r": float(k)}) for k in range(2)]
    plain, mixed = (credit(s, policy, everyone(Told()), outcome=w)([members]) for w in (0.0, 0.5))
    for k, (a, b) in enumerate(zip(plain, mixed, strict=True)):
        assert b.advantages == pytest.approx([x + 0.5 * (k - 0.5) for x in a.advantages])


# --------------------------------------------------------------------- whose log-prob


def test_the_current_student_scores_again_what_older_weights_wrote(s, policy):
    old = copy.deepcopy(policy)
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.2)
    stale = attempt(s, old, 0, 0, parts=[("policy", 3), ("tool", 2), ("policy", 2)], version=3)
    fresh = attempt(s, policy, 0, 1, version=4)
    worth = {}
    for student in ("current", "behaviour"):
        opd = credit(s, policy, everyone(Told(lambda k: 0.0)), r_max=1e9, version=4, student=student)
        worth[student] = [x.advantages for x in opd([[stale, fresh]])]
    assert worth["behaviour"][0] == pytest.approx([-x for x in student_of(stale)])
    again = score(policy, [passage(stale)])[0]
    assert worth["current"][0] == pytest.approx([-x for i, x in enumerate(again) if i not in (3, 4)], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(*(w[0] for w in worth.values()), strict=True)) > 1e-2
    assert worth["current"][1] == worth["behaviour"][1] == pytest.approx([-x for x in student_of(fresh)])


# --------------------------------------------------------------------- KL in the loss


def distilled(s, policy, teacher, **config):
    opd = credit(s, policy, everyone(teacher), **config)
    groups = [[attempt(s, policy, g, k, parts=[("policy", 3), ("tool", 2), ("policy", 4)]) for k in range(2)]
              for g in range(3)]  # fmt: skip
    return opd, groups


def test_what_it_sees_are_the_teachers_logits_at_the_policys_tokens(s, policy, policy_directory):
    teacher = LocalTeacher(policy_directory, credit(s, policy, {}).experts.seat)
    opd, groups = distilled(s, policy, teacher, loss="kl_full", temperature=0.7)
    scored = opd(groups)
    batch = pack(scored)
    rows = [4, 1]
    seen = opd.targets(batch.part(rows), [batch.names[r] for r in rows])
    for row, r in enumerate(rows):
        t = scored[r].trajectory
        asked = passage(t, opd_prompt(s, t))
        with torch.no_grad():
            logits = teacher.model.logits(teacher.model(torch.tensor([asked.tokens])))[0] / 0.7
        at = [asked.first - 1 + k for k in (0, 1, 2, 5, 6, 7, 8)]
        torch.testing.assert_close(seen.of_row(row), logits[at], atol=1e-4, rtol=1e-4)
    taught = [x + r for x, r in zip(student_of(t), opd.explain(t)["teacher_log_ratio"], strict=True)]
    assert taught == pytest.approx([float(logits.log_softmax(-1)[i, asked.tokens[i + 1]]) for i in at], abs=1e-3)


def opd_prompt(s, t):
    return teacher_prompt(s, s.task("train", t.group))


@pytest.mark.parametrize("loss", ["kl_full", "kl_topk"])
def test_no_gradient_flows_through_the_teacher(s, policy, policy_directory, loss):
    """slime#1449, torchforge#527: the student itself as the teacher pulls exactly as its frozen copy does."""
    gradients = []
    for frozen in (False, True):
        student = copy.deepcopy(policy)
        taught_by = copy.deepcopy(student) if frozen else student
        teacher = LocalTeacher(policy_directory, credit(s, student, {}).experts.seat)
        teacher.seat.take(teacher.where, lambda m=taught_by: m)
        config = DistillConfig.model_validate({"loss": loss, "kl": {"top_k": 5}})
        opd, groups = distilled(s, student, teacher, **config.model_dump())
        opd.learner.objective = config.objective
        batch = pack(opd(groups))
        tokens = opd.learner._tokens(batch, batch.part(range(batch.rows)), None)
        opd.learner.objective(tokens).backward()
        gradients.append([p.grad for n, p in student.named_parameters() if not n.startswith("mtp.")])
        assert not frozen or all(p.grad is None for p in taught_by.parameters())
    assert max(float(g.abs().max()) for g in gradients[0]) > 1e-3
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_whole_distributions_need_local_teachers_of_the_same_width(s, policy, policy_directory, tmp_path):
    opd, groups = distilled(s, policy, ServedTeacher("http://nowhere/v1"), loss="kl_full")
    with pytest.raises(UserError, match=r"distill\.loss = kl_full: needs the teacher's whole distribution, and http"):
        opd(groups)
    wide = tiny.model(vocab=s.tokenizer.vocab_size + 64)
    hf.save(wide, tmp_path)
    opd, groups = distilled(s, policy, LocalTeacher(tmp_path, opd.experts.seat), loss="kl_topk")
    with pytest.raises(UserError, match=rf"has a head of {s.tokenizer.vocab_size + 64} rows and the student one of"):
        opd(groups)


# --------------------------------------------------------------------- the books


def test_a_group_that_is_not_whole_stops_the_run(s, policy):
    with pytest.raises(Exception, match="group 0"):
        credit(s, policy, everyone(Told()), samples=3)([[attempt(s, policy, 0)]])


def test_a_task_without_an_expert_is_refused_by_name(s, policy):
    opd = credit(s, policy, {("agents", "max"): Told()})
    with pytest.raises(UserError, match=r"no expert for (agents|general):low; give one with --expert \1:low=DIR"):
        opd([[attempt(s, policy, 0), attempt(s, policy, 0, 1)]])


def test_nothing_played_is_nothing_trained(s, policy):
    opd = credit(s, policy, everyone(Told()))
    assert opd([]) == [] and opd.figures["opd_kl"] == 0
    failed = made.group([None, None])
    assert opd([failed]) == []


def test_experts_are_opened_once_each_and_share_a_seat(policy_directory):
    config = DistillConfig(experts={"agents:low": str(policy_directory), "general:low": str(policy_directory)})
    experts = Experts.open(config)
    assert experts.teachers["agents", "low"] is experts.teachers["general", "low"]
