"""Law 7: exp(-overlap loss) is the acceptance that the verifier measures, position by position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_law05_distribution import rows

from nonet.engine.drafter import Choice, Proposal
from nonet.engine.sampler import Distributions
from nonet.engine.verification import verify
from nonet.ops.overlap import Head, overlap, overlap_definition
from nonet.types import Sampling

T, W, D, EACH = 24, 40, 8, 5000
PRUNED = torch.tensor([33, 2, 17, 5, 28, 9, 0, 39, 21, 12, 30, 8])
every_draft = pytest.mark.parametrize("vocabulary", [None, PRUNED], ids=["whole", "pruned"])


def heads(vocabulary: torch.Tensor | None) -> tuple[Head, Head]:
    """A draft and a target of T positions, alike in some and far apart in others."""
    generator = torch.Generator().manual_seed(1)
    hidden_TD, weight_WD = (torch.randn(n, D, generator=generator) for n in (T, W))
    noise_TD = torch.randn(T, D, generator=generator) * torch.linspace(0, 2, T)[:, None]
    own_WD = weight_WD if vocabulary is None else weight_WD[vocabulary]
    return Head(hidden_TD + noise_TD, own_WD), Head(hidden_TD, weight_WD)


@every_draft
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_of_every_position_is_minus_log_of_the_expected_and_the_measured_acceptance(vocabulary, temperature):
    draft, target = heads(vocabulary)
    z_TV, z_TW = draft.hidden_TD @ draft.weight_WD.T, target.hidden_TD @ target.weight_WD.T
    loss_T = overlap_definition(z_TV, z_TW, vocabulary, temperatures=(temperature, temperature)).rows_T
    sampling = Sampling(temperature)
    choice = Choice(rows(sampling, T * EACH, torch.zeros(T * EACH, 0, dtype=torch.long)))
    index_N, q_NV = choice.pick(z_TV.repeat_interleave(EACH, 0), 0)
    tokens_N1 = (index_N if vocabulary is None else vocabulary[index_N]).unsqueeze(1)
    proposal = Proposal(tokens_N1, torch.ones_like(index_N), q_NV.unsqueeze(1), vocabulary)
    logits_N2W = z_TW.repeat_interleave(EACH, 0).unsqueeze(1).expand(-1, 2, -1)
    how = rows(sampling, T * EACH, tokens_N1)
    p_TW = Distributions.of(logits_N2W[::EACH, 0], rows(sampling, T, tokens_N1[:T, :0])).shaped_NW.double().exp()
    q_TW = proposal.q_at(torch.zeros(T * EACH, dtype=torch.long), W)[::EACH]
    expected_T = torch.minimum(p_TW, q_TW).sum(-1)
    np.testing.assert_allclose((-loss_T.double()).exp(), expected_T, atol=1e-6)
    measured_T = verify(logits_N2W, proposal, how).accepted_B.view(T, EACH).double().mean(-1)
    assert expected_T.min() < 0.3 < 0.9 < expected_T.max()
    for expected, measured in zip(expected_T.clamp(max=1).tolist(), measured_T.tolist(), strict=True):
        assert abs(expected - measured) <= 4.5 * math.sqrt(expected * (1 - expected) / EACH) + 1e-6


@every_draft
def test_the_fused_loss_that_training_uses_says_the_same(vocabulary):
    draft, target = heads(vocabulary)
    fused = overlap(draft, target, vocabulary)
    z_TV, z_TW = draft.hidden_TD @ draft.weight_WD.T, target.hidden_TD @ target.weight_WD.T
    torch.testing.assert_close(fused.rows_T, overlap_definition(z_TV, z_TW, vocabulary).rows_T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused.alpha_T, (-fused.rows_T).exp(), rtol=1e-5, atol=1e-6)
