"""Small random K3 directories, written tensor by tensor after k3 section 1.1 and not by nonet.model.

Every value is drawn so that none can be forgotten without a trace: norms are not one, biases not zero, A_log not zero.
Experts are MXFP4 by their codes, so the packed bytes are the truth. The vocabulary is printable text only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

END, PAD = "<|end|>", "<|pad|>"
LETTERS = [chr(c) for c in range(0x21, 0x7F)]
MERGES = [(a, b) for a in "abcdefghij" for b in "klmnopqrst"]
VOCAB = 2 + len(LETTERS) + len(MERGES)


def config(**fields: Any) -> dict[str, Any]:
    """Six layers K K M K K M, blocks of two, the first layer dense. A dotted name reaches into a table."""
    out: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "vocab_size": VOCAB + 3,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 4, 5],
            "full_attn_layers": [3, 6],
        },
        "attn_res_block_size": 2,
        "num_nextn_predict_layers": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "torch_dtype": "float32",
    }
    for key, value in fields.items():
        table, _, leaf = key.replace("__", ".").rpartition(".")
        (out[table] if table else out)[leaf] = value
    return out


def write(folder: Path, packed: bool = True, rank: int = 16, seed: int = 0, prefix: str = "", **fields: Any) -> Path:
    """Write the directory; returns it. rank: of the decay bottleneck. None as a field's value drops it."""
    folder.mkdir(parents=True, exist_ok=True)
    c = {key: value for key, value in config(**fields).items() if value is not None}
    if packed and c.get("num_experts"):
        c["quantization_config"] = quantization_config()
    (folder / "config.json").write_text(json.dumps(c, indent=1))
    tensors = Tensors(c, packed, rank, seed).all()
    save_file({prefix + name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    tokenizer(folder)
    return folder


def quantization_config() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False, "scale_dtype": "torch.uint8"}}
    ignore = ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"]
    scheme = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ignore}
    return scheme | {"config_groups": {"group_0": group | {"input_activations": None}}}


class Tensors:
    def __init__(self, c: dict[str, Any], packed: bool, rank: int, seed: int):
        self.c, self.packed, self.rank = c, packed, rank
        self.generator = torch.Generator().manual_seed(seed)
        self.out: dict[str, Tensor] = {}

    def all(self) -> dict[str, Tensor]:
        c, D = self.c, self.c["hidden_size"]
        self.normal("model.embed_tokens.weight", c["vocab_size"], D, scale=None if c["tie_word_embeddings"] else 1.0)
        self.ones("model.norm.weight", D)
        if not c["tie_word_embeddings"]:
            self.normal("lm_head.weight", c["vocab_size"], D)
        if c.get("attn_res_block_size"):
            self.site("model.output_attn_res")
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.ones(f"{at}{name}.weight", D)
            if c.get("attn_res_block_size"):
                self.site(f"{at}self_attention_res")
                self.site(f"{at}mlp_res")
            (self.mla if i + 1 in c["linear_attn_config"]["full_attn_layers"] else self.kda)(f"{at}self_attn.")
            dense = not c.get("num_experts") or i < c["first_k_dense_replace"]
            self.glu(f"{at}mlp.", c["intermediate_size"]) if dense else self.moe(f"{at}block_sparse_moe.")
        return self.out

    def normal(self, name: str, *shape: int, scale: float | None = None) -> None:
        spread = scale or shape[-1] ** -0.5
        self.out[name] = torch.randn(shape, generator=self.generator) * spread

    def ones(self, name: str, width: int) -> None:
        self.out[name] = 1 + 0.2 * torch.randn(width, generator=self.generator)

    def site(self, name: str) -> None:
        self.ones(f"{name}_norm.weight", self.c["hidden_size"])
        self.normal(f"{name}_proj.weight", 1, self.c["hidden_size"])

    def kda(self, at: str) -> None:
        linear, D, H = self.c["linear_attn_config"], self.c["hidden_size"], self.c["num_attention_heads"]
        K = linear["head_dim"]
        C = H * K
        for p in "qkv":
            self.normal(f"{at}{p}_proj.weight", C, D)
            self.normal(f"{at}{p}_conv1d.weight", C, 1, linear["short_conv_kernel_size"])
        self.normal(f"{at}f_a_proj.weight", self.rank, D)
        self.normal(f"{at}f_b_proj.weight", C, self.rank)
        self.normal(f"{at}b_proj.weight", H, D)
        self.normal(f"{at}g_proj.weight", C, D)
        self.normal(f"{at}dt_bias", C, scale=1.0)
        self.out[f"{at}dt_bias"] -= 2.0  # most channels forget slowly
        self.normal(f"{at}A_log", H, scale=0.3)
        self.ones(f"{at}o_norm.weight", K)
        self.normal(f"{at}o_proj.weight", D, C)

    def mla(self, at: str) -> None:
        c, D, H = self.c, self.c["hidden_size"], self.c["num_attention_heads"]
        queries = H * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        if c.get("q_lora_rank"):
            self.normal(f"{at}q_a_proj.weight", c["q_lora_rank"], D)
            self.ones(f"{at}q_a_layernorm.weight", c["q_lora_rank"])
            self.normal(f"{at}q_b_proj.weight", queries, c["q_lora_rank"])
        else:
            self.normal(f"{at}q_proj.weight", queries, D)
        self.normal(f"{at}kv_a_proj_with_mqa.weight", c["kv_lora_rank"] + c["qk_rope_head_dim"], D)
        self.ones(f"{at}kv_a_layernorm.weight", c["kv_lora_rank"])
        self.normal(f"{at}kv_b_proj.weight", H * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
        if c.get("mla_use_output_gate"):
            self.normal(f"{at}g_proj.weight", H * c["v_head_dim"], D)
        self.normal(f"{at}o_proj.weight", D, H * c["v_head_dim"])

    def glu(self, at: str, width: int) -> None:
        D = self.c["hidden_size"]
        self.normal(f"{at}gate_proj.weight", width, D)
        self.normal(f"{at}up_proj.weight", width, D)
        self.normal(f"{at}down_proj.weight", D, width)

    def moe(self, at: str) -> None:
        c, D = self.c, self.c["hidden_size"]
        latent, F = c.get("routed_expert_hidden_size") or D, c["moe_intermediate_size"]
        self.normal(f"{at}gate.weight", c["num_experts"], D)
        self.normal(f"{at}gate.e_score_correction_bias", c["num_experts"], scale=0.1)
        if c.get("routed_expert_hidden_size"):
            self.normal(f"{at}routed_expert_down_proj.weight", latent, D)
            self.normal(f"{at}routed_expert_up_proj.weight", D, latent)
        if c.get("routed_expert_hidden_size") and c.get("latent_moe_use_norm"):
            self.ones(f"{at}routed_expert_norm.weight", latent)
        if c.get("num_shared_experts"):
            self.glu(f"{at}shared_experts.", c["num_shared_experts"] * F)
        for e in range(c["num_experts"]):
            for part, shape in (("w1", (F, latent)), ("w3", (F, latent)), ("w2", (latent, F))):
                self.expert(f"{at}experts.{e}.{part}", *shape)

    def expert(self, name: str, rows: int, columns: int) -> None:
        if not self.packed:
            self.normal(f"{name}.weight", rows, columns)
            return
        draw = lambda low, high, width: torch.randint(low, high, (rows, width), generator=self.generator)  # noqa: E731
        self.out[f"{name}.weight_packed"] = draw(0, 256, columns // 2).to(torch.uint8)
        self.out[f"{name}.weight_scale"] = draw(121, 125, columns // 32).to(torch.uint8)  # 2^-6 to 2^-3


def tokenizer(folder: Path) -> None:
    """A BPE over printable ASCII whose text splits into single digits and words, as a small model's might."""
    words = {token: i + 2 for i, token in enumerate([*LETTERS, *("".join(m) for m in MERGES)])}
    core = Tokenizer(models.BPE(vocab={END: 0, PAD: 1, **words}, merges=MERGES))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    core.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore
    core.decoder = decoders.ByteLevel()  # pyright: ignore
    core.add_special_tokens([AddedToken(END), AddedToken(PAD)])
    core.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    named = {"eos_token": END, "pad_token": PAD, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
