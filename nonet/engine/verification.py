"""Which drafted tokens stand, and what is written after them, so that drafting changes no distribution.

One-hot drafts, and greedy rows: at every position the target draws what it would have drawn without a draft, from the
same uniform; drafted tokens stand as long as they are that. The text is the plain text, token for token; a draft is
accepted with probability p(x). Of equal logits the lowest id is the argmax, for drafts and target alike, and ids are
what is compared: a draft that breaks a tie otherwise is rejected, and changes nothing.

Sampled drafts (Leviathan et al., arXiv 2211.17192, algorithm 1): x drawn from q stands if u q(x) < p(x), so with
probability min(1, p/q); at the first that does not, the token is drawn from max(0, p - q), normalised. Together these
are p: the same distribution, other tokens. p is what plain decoding would have drawn from there, after every transform;
a drafted token outside its support is never accepted. Acceptance at a position is sum min(p, q).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nonet.engine.drafter import COIN, RESIDUAL, TARGET, Proposal
from nonet.engine.sampler import Distributions, SamplingRows, draw
from nonet.ops.rng import uniforms


@dataclass(frozen=True)
class Verified:
    """accepted_B[b] drafted tokens of row b stand; it writes tokens_BT[b, : accepted_B[b] + 1], with these log-probs
    under the target, after and before the sampling transform.
    """

    accepted_B: Tensor
    tokens_BT: Tensor
    logprobs_BT: Tensor
    raw_logprobs_BT: Tensor


def verify(logits_BTW: Tensor, proposal: Proposal, how: SamplingRows) -> Verified:
    """logits_BTW: of the target after the last known token and after each of the K = T-1 drafted ones. how: sampling of
    the B * T rows, each if what was drafted before it is right.
    """
    B, T, _ = logits_BTW.shape
    found = Distributions.of(logits_BTW.flatten(0, 1), how)
    if proposal.q_BKV is None:
        tokens_BT = draw(found.shaped_NW, found.said_NW, how.greedy, uniforms(how.keys, how.positions, TARGET)).view(
            B, T
        )
        accepted_B = _run(tokens_BT[:, :-1] == proposal.tokens_BK, proposal.counts_B)
    else:
        accepted_B, tokens_BT = _reject(found, proposal, how)
    after_N, before_N = found.of_tokens(tokens_BT.reshape(-1, 1), how.greedy)
    return Verified(accepted_B, tokens_BT, after_N.view(B, T), before_N.view(B, T))


def _reject(found: Distributions, proposal: Proposal, how: SamplingRows) -> tuple[Tensor, Tensor]:
    """(accepted_B, tokens_BT) of sampled drafts."""
    (B, K), W = proposal.tokens_BK.shape, found.shaped_NW.shape[1]
    rows_B = torch.arange(B, device=proposal.tokens_BK.device)
    greedy_B = None if how.greedy is None else how.greedy.reshape(B, K + 1)[:, 0]
    accepted_B = _run(_stand(found, proposal, how), proposal.counts_B)
    here_B, rejected_B = rows_B * (K + 1) + accepted_B, accepted_B < proposal.counts_B
    p_BW = found.shaped_NW[here_B].double().exp()
    rest_BW = (p_BW - proposal.q_at(accepted_B.clamp_max(K - 1), W)).clamp_min(0)
    # Where p = q nothing is left over, and only rounding can have rejected.
    left_B1 = rejected_B.unsqueeze(1) & (rest_BW.sum(-1, keepdim=True) > 0)
    at, purpose = here_B.cpu().numpy(), np.where(rejected_B.cpu().numpy(), RESIDUAL, TARGET)
    draws_B = uniforms(how.keys[at], how.positions[at], purpose)
    last_B = draw(torch.where(left_B1, rest_BW, p_BW).log(), found.said_NW[here_B], greedy_B, draws_B)
    tokens_BT = torch.cat([proposal.tokens_BK, last_B.unsqueeze(1)], 1)
    tokens_BT[rows_B, accepted_B] = last_B
    return accepted_B, tokens_BT


def _stand(found: Distributions, proposal: Proposal, how: SamplingRows) -> Tensor:
    """[B, K]: u q < p, which never lets through what the target would not have drawn; in greedy rows the argmax."""
    B, K = proposal.tokens_BK.shape
    p_BKW = found.shaped_NW.view(B, K + 1, -1)[:, :K]
    p_BK = p_BKW.gather(2, proposal.tokens_BK.unsqueeze(2)).squeeze(2).double().exp()
    coins_BK = uniforms(how.keys, how.positions, COIN).reshape(B, K + 1)[:, :K]
    stand_BK = torch.from_numpy(coins_BK).to(p_BK.device) * proposal.q_of_tokens() < p_BK
    if how.greedy is None:
        return stand_BK
    best_BK = found.said_NW.argmax(-1).view(B, K + 1)[:, :K]
    greedy_BK = torch.from_numpy(how.greedy.reshape(B, K + 1)[:, :K]).to(best_BK.device)
    return torch.where(greedy_BK, best_BK == proposal.tokens_BK, stand_BK)


def _run(stand_BK: Tensor, counts_B: Tensor) -> Tensor:
    """How many of the first counts_B stand in a row, [B]."""
    real_BK = torch.arange(stand_BK.shape[1], device=stand_BK.device) < counts_B.unsqueeze(1)
    return (stand_BK & real_BK).long().cumprod(-1).sum(-1)
