"""The network: embedding, blocks of mixer and feed-forward, final norm, head, and an optional MTP layer.

`Model.forward` turns tokens into the hidden state before the final norm: the output mixture where there are attention
residuals, the residual stream where there are none. That tensor is named once, here: it is what the MTP layer reads
(`hnorm`), what a draft's high feature will be, and what `logits` normalises. The same forward serves training (no
state) and generation (a SequenceState, updated in place).

The MTP layer is trained with the model (`lm`), carried along without gradient by RL and distillation, and brought back
to the finished policy when it becomes a draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from nonet.model.attention import GQA, MLA, Rotation
from nonet.model.attn_res import Site, Stream
from nonet.model.config import Mixer, ModelConfig
from nonet.model.cost import Cost
from nonet.model.ffn import FFN, RMSNorm
from nonet.model.kda import KDA
from nonet.model.moe import MoE
from nonet.model.span import Documents, Span
from nonet.model.state import PAGE, SequenceState
from nonet.model.taps import Taps
from nonet.model.tree import Tree


class Block(nn.Module):
    """Mixer, then feed-forward, each reading the normed stream and adding to it.

    With attention residuals each has a site that mixes what it reads; layers that open a block bank the last one first.
    """

    def __init__(self, config: ModelConfig, mixer: Mixer, moe: bool, first: bool = False, attn_res: bool = False):
        super().__init__()
        d, eps = config.d_model, config.norm_eps
        self.mixer, self.first = mixer, first
        self.input_layernorm = RMSNorm(d, eps)
        self.self_attn = {"gqa": GQA, "mla": MLA, "kda": KDA}[mixer](config)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.mlp = MoE(config) if moe else FFN(config)
        self.self_attention_res = Site(d, eps) if attn_res else None
        self.mlp_res = Site(d, eps) if attn_res else None

    def forward(self, stream: Stream, span: Span, state: dict | None) -> None:
        h = stream.read(self.self_attention_res)
        if self.first:
            stream.bank()
        stream.add(self.self_attn(self.input_layernorm(h), span, state))
        h = self.post_attention_layernorm(stream.read(self.mlp_res))
        stream.add(self.mlp(h, span.valid_BT) if isinstance(self.mlp, MoE) else self.mlp(h))


class MTP(nn.Module):
    """Multi-token prediction layer (k3 section 3.2b): reads [enorm(embedding of t+1); hnorm(hidden of t)], predicts
    t+2. The embedding is zeroed in a sequence's first row, as public engines do.

    A full-attention block like the backbone's last, with an ordinary residual and its own final norm; embedding and
    head are the model's.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        d, eps = config.d_model, config.norm_eps
        self.enorm, self.hnorm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        self.block = Block(config, "mla" if "mla" in config.layer_mixers else "gqa", config.is_moe(config.layers))
        self.norm = RMSNorm(d, eps)

    def forward(self, embed_BTD: Tensor, hidden_BTD: Tensor, span: Span, state: dict | None = None) -> Tensor:
        assert span.positions_BT is not None
        embed_BTD = embed_BTD * (span.positions_BT > 0).unsqueeze(-1)
        stream = Stream(self.eh_proj(torch.cat([self.enorm(embed_BTD), self.hnorm(hidden_BTD)], -1)))
        self.block(stream, span, state)
        return stream.read(None)


class Model(nn.Module):
    """A decoder. `config` holds every dimension; parameters carry Hugging Face names."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        size = config.attn_res_block
        self.layers = nn.ModuleList(
            Block(config, mixer, config.is_moe(i), first=size > 0 and i % size == 0, attn_res=size > 0)
            for i, mixer in enumerate(config.layer_mixers)
        )
        self.output_attn_res = Site(config.d_model, config.norm_eps) if size else None
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = MTP(config) if config.mtp_layers else None
        self._rotation = Rotation(config)

    def forward(
        self,
        tokens_BT: Tensor,
        state: SequenceState | None = None,
        counts_B: Tensor | None = None,
        starts: Sequence[int] | None = None,
        taps: Taps | None = None,
        tree: Tree | None = None,
    ) -> Tensor:
        """hidden_BTD before the final norm.

        counts_B: how many of the T tokens of each row are real (right padding after them); None: all. state: extended
        in place by each row's real tokens; None: fresh sequences, nothing kept. starts: where documents packed into the
        one row begin; they do not see each other. tree: of the one row. taps: filled with the hidden states it names.
        """
        span = self.span(tokens_BT, state, counts_B, starts, tree)
        stream = Stream(self.embed_tokens(tokens_BT))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Block)
            if taps is not None and i in taps.layers:
                taps.take(i, stream.read(layer.self_attention_res))
            layer(stream, span, None if state is None else state.layers[i])
        if state is not None:
            state.lengths_B += tokens_BT.shape[1] if counts_B is None else counts_B
        hidden_BTD = stream.read(self.output_attn_res)
        if taps is not None and len(self.layers) in taps.layers:
            taps.take(len(self.layers), hidden_BTD)
        return hidden_BTD

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def mtp_logits(
        self,
        tokens_BT: Tensor,
        hidden_BTD: Tensor,
        counts_B: Tensor | None = None,
        starts: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits [B, T-1, W] for the token two ahead: row t sees hidden t and the embedding of token t+1. counts_B and
        starts as in `forward`.
        """
        if self.mtp is None:
            raise ValueError("this model has no MTP layer (mtp_layers = 0)")
        short = None if starts is None else Documents(starts, tokens_BT.shape[1]).shortened().starts
        span = self.span(tokens_BT[:, 1:], None, None if counts_B is None else counts_B - 1, short)
        x = self.mtp(self.embed_tokens(tokens_BT[:, 1:]), hidden_BTD[:, :-1], span)
        return self.lm_head(self.mtp.norm(x))

    # ------------------------------------------------------------ positions

    def span(
        self,
        tokens_BT: Tensor,
        state: SequenceState | None = None,
        counts_B: Tensor | None = None,
        starts: Sequence[int] | None = None,
        tree: Tree | None = None,
    ) -> Span:
        T, device = tokens_BT.shape[1], tokens_BT.device
        steps_T = torch.arange(T, device=device)
        valid = None if counts_B is None else steps_T < counts_B[:, None]
        packed = starts is not None or tree is not None
        if packed and (state is not None or counts_B is not None or len(tokens_BT) != 1):
            raise ValueError("packed documents are one fresh row: no state, no counts, batch 1")
        if tree is not None:
            positions_BT = tree.positions_N.to(device).unsqueeze(0)
            return Span(positions_BT, None, None, tree=tree, rotation=self.rotation(positions_BT))
        if starts is not None:
            documents = Documents(starts, T)
            positions_BT = documents.positions_N.to(device).unsqueeze(0)
            return Span(positions_BT, None, None, documents=documents, rotation=self.rotation(positions_BT))
        if state is None:
            return Span(steps_T.unsqueeze(0), valid, counts_B, rotation=self.rotation(steps_T.unsqueeze(0)))
        positions_BT = state.lengths_B[:, None] + steps_T
        end = int((state.lengths_B + (T if counts_B is None else counts_B)).max())
        if end > state.capacity:
            raise ValueError(f"state has room for {state.capacity} positions, this call needs {end}")
        span = Span(positions_BT, valid, counts_B, rotation=self.rotation(positions_BT))
        span.real_N = None if valid is None else valid.flatten().nonzero()[:, 0]
        span.places_N = state.places(positions_BT, span.real_N)
        span.slots, span.row_pages, span.after_BT = state.slots, state.table_BP.shape[1], state.after_BT
        if int(state.lengths_B.max()):
            span.table_BP = state.table_BP[:, : -(-end // PAGE)]
            read_L = torch.arange(span.table_BP.shape[1] * PAGE, device=device)
            span.mask_B1TL = (read_L <= positions_BT[:, :, None]).unsqueeze(1)
        return span

    def rotation(self, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and signed sin (first half negative) [B, T, 1, K] of each position; None in a model without RoPE."""
        return self._rotation(positions_BT, self.embed_tokens.weight)

    # --------------------------------------------------------------- experts

    def experts(self) -> Iterator[MoE]:
        """Every mixture of experts, in layer order, the MTP layer's last."""
        return (m for m in self.modules() if isinstance(m, MoE))

    def balance_(self) -> list[float]:
        """After an optimiser step in training: apply the observed balance to every router. MaxVio by layer."""
        moved = (m.gate.balance_() for m in self.experts())
        return [v for v in moved if v is not None]

    # ---------------------------------------------------------------- costs

    @property
    def cost(self) -> Cost:
        return Cost.of(self.config, self.named_parameters())

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())
