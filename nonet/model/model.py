"""The network: embedding, blocks of mixer and feed-forward, final norm, head, and an optional MTP layer.

`Model.forward` turns tokens into the hidden state before the final norm. That tensor is named once, here: it is what
the MTP layer reads (`hnorm`), what a draft's high feature will be, and what `logits` normalises. The same forward
serves training (no state) and generation (a SequenceState, updated in place).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nonet.model.attention import GQA, MLA, Span, rope_table
from nonet.model.config import Mixer, ModelConfig
from nonet.model.ffn import FFN, RMSNorm
from nonet.model.kda import KDA, init_dt_bias_
from nonet.model.state import SequenceState


class Block(nn.Module):
    """x + mixer(norm x), then x + ffn(norm x)."""

    def __init__(self, config: ModelConfig, mixer: Mixer):
        super().__init__()
        self.mixer = mixer
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = {"gqa": GQA, "mla": MLA, "kda": KDA}[mixer](config)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = FFN(config)

    def forward(self, x_BTD: Tensor, span: Span, rotation: tuple[Tensor, Tensor] | None, state: dict | None) -> Tensor:
        h = self.input_layernorm(x_BTD)
        mixed = self.self_attn(h, span, rotation, state) if self.mixer == "gqa" else self.self_attn(h, span, state)
        x_BTD = x_BTD + mixed
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class MTP(nn.Module):
    """Multi-token prediction layer (k3 section 3.2b): reads [enorm(embedding of t+1); hnorm(hidden of t)], predicts
    t+2.

    A full-attention block with an ordinary residual and its own final norm; embedding and head are the model's.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, eps = config.d_model, config.norm_eps
        self.enorm, self.hnorm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        self.block = Block(config, "mla" if "mla" in config.layer_mixers else "gqa")
        self.norm = RMSNorm(d, eps)

    def forward(
        self, embed_BTD: Tensor, hidden_BTD: Tensor, span: Span, rotation: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embed_BTD), self.hnorm(hidden_BTD)], -1))
        return self.block(x, span, rotation, None)


class Model(nn.Module):
    """A decoder. `config` holds every dimension; parameters carry Hugging Face names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config, m) for m in config.layer_mixers)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = MTP(config) if config.mtp_layers else None
        self._rope: tuple[Tensor, Tensor] | None = None  # see rotation

    def forward(self, tokens_BT: Tensor, state: SequenceState | None = None, counts_B: Tensor | None = None) -> Tensor:
        """hidden_BTD before the final norm.

        counts_B: how many of the T tokens of each row are real (right padding after them); None: all. state: extended
        in place by each row's real tokens; None: fresh sequences, nothing kept.
        """
        span = self._span(tokens_BT, state, counts_B)
        rotation = self.rotation(span.positions_BT)
        x = self.embed_tokens(tokens_BT)
        for i, layer in enumerate(self.layers):
            x = layer(x, span, rotation, None if state is None else state.layers[i])
        if state is not None:
            state.lengths_B += tokens_BT.shape[1] if counts_B is None else counts_B
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def mtp_logits(self, tokens_BT: Tensor, hidden_BTD: Tensor) -> Tensor:
        """Logits [B, T-1, W] for the token two ahead: row t sees hidden t and the embedding of token t+1."""
        if self.mtp is None:
            raise ValueError("this model has no MTP layer (mtp_layers = 0)")
        span = self._span(tokens_BT[:, 1:], None, None)
        embed = self.embed_tokens(tokens_BT[:, 1:])
        x = self.mtp(embed, hidden_BTD[:, :-1], span, self.rotation(span.positions_BT))
        return self.lm_head(self.mtp.norm(x))

    # ------------------------------------------------------------ positions

    def _span(self, tokens_BT: Tensor, state: SequenceState | None, counts_B: Tensor | None) -> Span:
        T, device = tokens_BT.shape[1], tokens_BT.device
        steps_T = torch.arange(T, device=device)
        valid = None if counts_B is None else steps_T < counts_B[:, None]
        if state is None:
            return Span(steps_T.unsqueeze(0), valid, counts_B)
        positions_BT = state.lengths_B[:, None] + steps_T
        longest = int(state.lengths_B.max()) + T
        ends = state.lengths_B + (T if counts_B is None else counts_B)
        if int(ends.max()) > state.capacity:
            raise ValueError(f"state has room for {state.capacity} positions, this call needs {int(ends.max())}")
        # Padding writes to the slot of its own position, which the row's next real token overwrites before anything can
        # look at it; where there is no such slot, only real tokens are written.
        slots = positions_BT.clamp(max=state.capacity - 1)
        real = valid.nonzero(as_tuple=True) if valid is not None and longest > state.capacity else None
        span = Span(positions_BT, valid, counts_B, slots, real)
        if longest > T:
            span.used = min(longest, state.capacity)
            slots_L = torch.arange(span.used, device=device)
            span.mask_B1TL = (slots_L <= positions_BT[:, :, None]).unsqueeze(1)
        return span

    def rotation(self, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and signed sin (first half negative) [B, T, 1, K] of each position; None in a model without RoPE.

        Rows of a table that grows with the longest position seen: two gathers where a sine would cost ten times that.
        """
        rope, weight = self.config.rope, self.embed_tokens.weight
        if rope is None:
            return None
        length, table = int(positions_BT.max()) + 1, self._rope
        alike = table is not None and (table[0].device, table[0].dtype) == (weight.device, weight.dtype)
        if table is None or not alike or len(table[0]) < length:
            self._rope = table = rope_table(rope, self.config.gqa_head_dim, max(256, 2 * length), weight)
        return table[0][positions_BT].unsqueeze(2), table[1][positions_BT].unsqueeze(2)

    # ---------------------------------------------------------------- costs

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Multiply-adds times two of one token's forward, attention over the context aside."""
        embedding = 0 if self.config.tie_embeddings else self.embed_tokens.weight.numel()
        mtp = sum(p.numel() for p in self.mtp.parameters()) if self.mtp else 0
        return 2 * (self.parameter_count() - embedding - mtp)


def initialise(model: Model, seed: int) -> Model:
    """Fill all parameters in place from a seed.

    | parameter                        | value                                   |
    |----------------------------------|-----------------------------------------|
    | matrices, embeddings             | normal(0, init_std)                     |
    | o_proj, down_proj                | normal(0, init_std / sqrt(2 * layers))  |
    | norms, biases                    | ones, zeros                             |
    | convolutions                     | uniform(+-1/sqrt(kernel))               |
    | KDA A_log, dt_bias               | 0, softplus^-1(log-uniform 1e-3..1e-1)  |
    | MTP eh_proj                      | [0 I] + normal(0, init_std): starts on the hidden state |
    """
    generator = torch.Generator().manual_seed(seed)
    std, depth = model.config.init_std, (2 * model.config.layers) ** -0.5
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("dt_bias"):
                init_dt_bias_(p, generator)
            elif "conv1d" in name:
                p.uniform_(-(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5, generator=generator)
            elif p.ndim == 1:
                p.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                p.normal_(0, std * (depth if "o_proj" in name or "down_proj" in name else 1), generator=generator)
        if model.mtp is not None:
            d = model.config.d_model
            model.mtp.eh_proj.weight[:, d:] += torch.eye(d)
    return model
