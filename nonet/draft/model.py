"""The draft: a fusion matrix, one layer, a norm; embedding and final head are the frozen target's.

    fused  = fc [tap_1; tap_2; ...]                          of the target's hidden states at position t
    out    = layer(embedding of token t + 1, fused)          and logits = head(norm(out)), of token t + 2
    out'   = layer(embedding of token t + 2, out)            the next step: its own output in place of a feature

Both forms have this surface. `mtp` (k3 section 3): the layer is the target's MTP layer and fc is [0 0 I], so that at
first its step is `Model.mtp_logits` to the last bit (law 6). `eagle3` (drafts section 4.1): one Llama layer whose
attention reads [norm(embedding); norm(fused)]; its head is its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nonet.draft.config import DraftConfig
from nonet.model import Model, ModelConfig
from nonet.model.attention import GQA, Rotation
from nonet.model.ffn import FFN, RMSNorm
from nonet.model.model import MTP
from nonet.model.span import Span
from nonet.types import UserError

# Hidden states are of size ten and more: behind a wide fc their random mixture would drown what the layer adds to it.
FUSION = 0.05


class PairAttention(GQA):
    """Reads two vectors of the layer's width side by side."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, bias = getattr(self, name).out_features, config.qkv_bias
            setattr(self, name, nn.Linear(2 * config.d_model, rows, bias=bias))


class PairLayer(nn.Module):
    """EAGLE-3's layer; parameters carry the names of public checkpoints."""

    def __init__(self, config: ModelConfig, norm_before_residual: bool):
        super().__init__()
        d, eps = config.d_model, config.norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm, self.hidden_norm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.self_attn = PairAttention(config)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.mlp = FFN(config)

    def forward(self, embed_BTD: Tensor, fused_BTD: Tensor, span: Span, state: dict | None = None) -> Tensor:
        normed = self.hidden_norm(fused_BTD)
        h = normed if self.norm_before_residual else fused_BTD
        h = h + self.self_attn(torch.cat([self.input_layernorm(embed_BTD), normed], -1), span, state)
        return h + self.mlp(self.post_attention_layernorm(h))


class Draft(nn.Module):
    """Its parameters are what is trained. The target is looked at, never changed and never saved with it.

    d2t_W: target id of each token it can say, None where it can say all; kept with the weights.
    """

    d2t_W: Tensor | None

    def __init__(self, config: DraftConfig, target: Model, d2t_W: Tensor | None = None):
        """Parameters as torch makes them: `started` or `files.load` fill them. Raises UserError."""
        super().__init__()
        self.config = config
        self._target = (target,)  # not a submodule
        self._rotation = Rotation(config.layer)
        layer, taps = config.layer, len(config.taps)
        d, eps = layer.d_model, layer.norm_eps
        if d != target.config.d_model:
            raise UserError(f"draft width {d}: it shares its target's embedding, so it must be {target.config.d_model}")
        self.register_buffer("d2t_W", None if d2t_W is None else checked_map(d2t_W, config))
        if d2t_W is None and config.draft_vocab is not None:
            raise UserError(f"d2t: missing, and the draft has {config.draft_vocab} tokens of its own; keep the map")
        self.fc = nn.Linear(taps * d, d, bias=False)
        if config.form == "mtp":
            self.mtp = MTP(layer)
        else:
            self.layer = PairLayer(layer, config.norm_before_residual)
            self.norm = RMSNorm(d, eps)
            self.lm_head = nn.Linear(d, config.words, bias=False)
        self.input_norm = RMSNorm(taps * d, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(d, eps) for _ in config.taps) if config.fc_norm else None

    @property
    def target(self) -> Model:
        return self._target[0]

    # ------------------------------------------------------------- the surface

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.target.embed_tokens.weight.detach())

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """fused_BTD of the taps, side by side in the order of `config.taps`."""
        x = features_BTF if self.input_norm is None else self.input_norm(features_BTF)
        if self.fc_norm is not None:
            parts = x.split(self.config.layer.d_model, -1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(x)

    def step(self, embed_BTD: Tensor, fused_BTD: Tensor, span: Span, state: dict | None = None) -> Tensor:
        """out_BTD, before the final norm. Row t: embedding of the token after the one whose state is fused_BTD[:, t].
        span as for a layer of a model; positions count these rows from 0.
        """
        return (self.mtp if self.config.form == "mtp" else self.layer)(embed_BTD, fused_BTD, span, state)

    def rotation(self, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of a Span, for the draft's own layer."""
        return self._rotation(positions_BT, self.fc.weight)

    def recycled(self, out_BTD: Tensor) -> Tensor:
        """What takes the place of the fused feature in the next step."""
        return self.final_norm(out_BTD) if self.config.norm_output else out_BTD

    def logits(self, out: Tensor) -> Tensor:
        """Over the draft's own vocabulary."""
        return F.linear(self.final_norm(out), self.head())

    @property
    def own_head(self) -> bool:
        """Whether its head is trained, or the target's."""
        return self.config.form == "eagle3"

    @property
    def final_norm(self) -> RMSNorm:
        norm = self.mtp.norm if self.config.form == "mtp" else self.norm
        assert isinstance(norm, RMSNorm)
        return norm

    def head(self) -> Tensor:
        """weight_WD: its own, or the target's rows of its vocabulary (a copy where that is pruned)."""
        if self.own_head:
            return self.lm_head.weight
        weight = self.target.lm_head.weight.detach()
        return weight if self.d2t_W is None else weight[self.d2t_W]


def started(
    config: DraftConfig, target: Model, d2t_W: Tensor | None = None, seed: int = 0, copied: bool = False
) -> Draft:
    """A draft before training, in the target's dtype.

    mtp: the MTP layer behind fc = [0 ... 0 I]. eagle3: matrices normal(0, init_std), fc FUSION of that, norms
    1, but for the final norm and the head, which are the target's own (rows of the draft's vocabulary). copied: an
    eagle3 layer then takes over what the target's last layer does with the highest feature; it learns several times
    faster. Raises UserError where that layer has another shape (`can_copy`).
    """
    if copied and config.form == "mtp":
        raise UserError("draft.start = layer: an MTP draft starts from the target's MTP layer already; use auto")
    if copied and not can_copy(config, target):
        raise UserError("draft.start = layer: the target's last layer has another shape than the draft's; use random")
    draft = Draft(config, target, d2t_W)
    generator, d = torch.Generator().manual_seed(seed), config.layer.d_model
    with torch.no_grad():
        if config.form == "mtp":
            assert target.mtp is not None
            draft.mtp.load_state_dict(target.mtp.state_dict())
            draft.fc.weight.zero_()[:, -d:] = torch.eye(d)
        else:
            for p in draft.parameters():
                p.fill_(1) if p.ndim == 1 else p.normal_(0, config.layer.init_std, generator=generator)
            draft.fc.weight.mul_(FUSION)
            head = target.lm_head.weight
            draft.lm_head.weight.copy_(head if d2t_W is None else head[d2t_W])
            draft.norm.weight.copy_(target.norm.weight)
            if copied:
                take_over(draft, target)
    return draft.to(target.embed_tokens.weight.dtype).eval()


def can_copy(config: DraftConfig, target: Model) -> bool:
    """Whether an eagle3 draft's layer can take over the target's last one."""
    last = target.layers[-1]
    if config.form != "eagle3" or not isinstance(last.self_attn, GQA) or not isinstance(last.mlp, FFN):
        return False
    a, b = config.layer, target.config
    same = ("heads", "kv_heads", "head_dim", "d_ff", "qkv_bias", "o_bias", "qk_norm")
    return all(getattr(a, name) == getattr(b, name) for name in same)


def take_over(draft: Draft, target: Model) -> None:
    """The target's last layer into the half that reads the fused feature, and the highest feature into that."""
    last, d = target.layers[-1], draft.config.layer.d_model
    draft.fc.weight[:, -d:] += torch.eye(d)
    for name, w in last.get_submodule("self_attn").named_parameters():
        mine = draft.layer.self_attn.get_parameter(name)
        (mine[:, d:] if mine.ndim == 2 and mine.shape[1] == 2 * d else mine).copy_(w)
    names = {"mlp": "mlp", "hidden_norm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
    for mine, its in names.items():
        draft.layer.get_submodule(mine).load_state_dict(last.get_submodule(its).state_dict())


def checked_map(d2t_W: Tensor, config: DraftConfig) -> Tensor:
    """Itself; raises UserError unless it names `draft_vocab` tokens of the target, each once."""
    W, V = config.draft_vocab, config.layer.vocab_size
    if W is None or d2t_W.shape != (W,) or d2t_W.dtype != torch.int64:
        raise UserError(f"d2t: {d2t_W.dtype} of shape {tuple(d2t_W.shape)}; needs int64 of shape ({W},)")
    if int(d2t_W.min()) < 0 or int(d2t_W.max()) >= V or len(d2t_W.unique()) < W:
        raise UserError(f"d2t: needs {W} ids of the target (0 to {V - 1}), each once, and not offsets from 0, 1, 2 ...")
    return d2t_W
