"""Small GGUF models with random weights, for layouts that no downloadable model of that size has.

The vocabulary is the 256 bytes plus three control tokens, so that every tool can tokenize any text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import gguf
import numpy as np

N_VOCAB = 259


def _vocab(writer: gguf.GGUFWriter) -> None:
    tokens = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_vocab_size(N_VOCAB)


class _Weights:
    """Random tensors, scaled so that activations keep their size; queries and keys larger, so that attention is sharp."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int):
        self.writer = writer
        self.rng = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        values = self.rng.standard_normal(shape) * (gain / np.sqrt(shape[-1]))
        self.writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def vector(self, name: str, size: int, kind: str = "weight", value: float = 1.0) -> None:
        self.writer.add_tensor(f"{name}.{kind}", (value + 0.1 * self.rng.standard_normal(size)).astype(np.float32))


    def attention(self, block: str, n_embd: int, n_head: int, n_head_kv: int, head: int, head_v: int | None = None, gain: float = 1.0) -> None:
        """Separate Q, K, V and output; ``gain`` is that of Q and K."""
        head_v = head_v or head
        self.matrix(f"{block}.attn_q", n_head * head, n_embd, gain=gain)
        self.matrix(f"{block}.attn_k", n_head_kv * head, n_embd, gain=gain)
        self.matrix(f"{block}.attn_v", n_head_kv * head_v, n_embd)
        self.matrix(f"{block}.attn_output", n_embd, n_head * head_v)

    def ends(self, n_embd: int) -> None:
        """Embedding, last norm and an output matrix of its own."""
        self.matrix("token_embd", N_VOCAB, n_embd, gain=np.sqrt(n_embd))
        self.vector("output_norm", n_embd)
        self.matrix("output", N_VOCAB, n_embd, gain=2.0)

    def tied_ends(self, n_embd: int) -> None:
        """Embedding, which is the output matrix too, and the last norm."""
        self.matrix("token_embd", N_VOCAB, n_embd, gain=2.0)
        self.vector("output_norm", n_embd)


def _common(writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_ctx: int) -> None:
    writer.add_block_count(n_layer)
    writer.add_embedding_length(n_embd)
    writer.add_context_length(n_ctx)
    writer.add_rope_freq_base(10000.0)
    _vocab(writer)


def _heads(writer: gguf.GGUFWriter, n_head: int, n_head_kv: int, n_ff: int, head: int | None = None) -> None:
    """Numbers of heads and the hidden size; with ``head`` the size of keys and values, where the width does not say it."""
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_feed_forward_length(n_ff)
    if head is not None:
        writer.add_key_length(head)
        writer.add_value_length(head)


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _ffn(weights: _Weights, block: str, n_embd: int, n_ff: int) -> None:
    weights.matrix(f"{block}.ffn_gate", n_ff, n_embd)
    weights.matrix(f"{block}.ffn_up", n_ff, n_embd)
    weights.matrix(f"{block}.ffn_down", n_embd, n_ff)


def llama(
    path: Path,
    *,
    head: int = 64,
    head_v: int | None = None,
    n_head: int = 4,
    n_head_kv: int | Sequence[int] = 2,
    n_layer: int = 4,
    n_embd: int = 128,
    n_ff: int = 192,
    n_ctx: int = 4096,
    n_rot: int | None = None,
    seed: int = 1,
) -> Path:
    """A dense transformer.

    A sequence for ``n_head_kv`` makes layers differ (arch deci), ``n_rot`` below ``head`` rotates
    only a part of each head (arch stablelm).
    """
    varying = not isinstance(n_head_kv, int)
    partial = n_rot is not None and n_rot != head
    arch = "deci" if varying else "stablelm" if partial else "llama"
    kv_heads = list(n_head_kv) if varying else [n_head_kv] * n_layer
    head_v = head_v or head
    if partial:
        n_embd = n_head * head  # stablelm takes no other
    writer = gguf.GGUFWriter(path, arch)
    _common(writer, n_layer, n_embd, n_ctx)
    writer.add_head_count([n_head] * n_layer if varying else n_head)
    writer.add_head_count_kv(kv_heads if varying else n_head_kv)
    writer.add_feed_forward_length([n_ff] * n_layer if varying else n_ff)
    writer.add_key_length(head)
    writer.add_value_length(head_v)
    writer.add_rope_dimension_count(n_rot or head)
    if partial:
        writer.add_layer_norm_eps(1e-5)
        writer.add_parallel_residual(False)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.ends(n_embd)
    if partial:
        weights.vector("output_norm", n_embd, "bias", 0.0)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            weights.vector(f"{block}.{norm}", n_embd)
            if partial:
                weights.vector(f"{block}.{norm}", n_embd, "bias", 0.0)
        weights.attention(block, n_embd, n_head, kv_heads[layer], head, head_v, gain=1.5)
        _ffn(weights, block, n_embd, n_ff)
    return _finish(writer, path)


def mla(
    path: Path,
    *,
    n_lora_kv: int = 128,
    n_rot: int = 64,
    head_nope: int = 64,
    head_v: int = 64,
    n_head: int = 4,
    n_layer: int = 4,
    n_embd: int = 128,
    n_ff: int = 192,
    n_ctx: int = 4096,
    seed: int = 1,
) -> Path:
    """Multi-head latent attention (arch deepseek2): one K per token, V is a view of it."""
    n_lora_q = 96
    writer = gguf.GGUFWriter(path, "deepseek2")
    _common(writer, n_layer, n_embd, n_ctx)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(n_ff)
    writer.add_leading_dense_block_count(n_layer)
    writer.add_q_lora_rank(n_lora_q)
    writer.add_kv_lora_rank(n_lora_kv)
    writer.add_key_length(n_lora_kv + n_rot)
    writer.add_value_length(n_lora_kv)
    writer.add_key_length_mla(head_nope + n_rot)
    writer.add_value_length_mla(head_v)
    writer.add_rope_dimension_count(n_rot)
    writer.add_expert_feed_forward_length(n_ff)
    writer.add_expert_shared_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.ends(n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        weights.vector(f"{block}.attn_norm", n_embd)
        weights.vector(f"{block}.attn_q_a_norm", n_lora_q)
        weights.vector(f"{block}.attn_kv_a_norm", n_lora_kv)
        weights.matrix(f"{block}.attn_q_a", n_lora_q, n_embd)
        weights.matrix(f"{block}.attn_q_b", n_head * (head_nope + n_rot), n_lora_q, gain=1.5)
        weights.matrix(f"{block}.attn_kv_a_mqa", n_lora_kv + n_rot, n_embd, gain=1.5)
        weights.matrix(f"{block}.attn_k_b", n_head, n_lora_kv, head_nope)
        weights.matrix(f"{block}.attn_v_b", n_head, head_v, n_lora_kv)
        weights.matrix(f"{block}.attn_output", n_embd, n_head * head_v)
        weights.vector(f"{block}.ffn_norm", n_embd)
        _ffn(weights, block, n_embd, n_ff)
    return _finish(writer, path)


def iswa(
    path: Path,
    *,
    n_layer: int = 7,
    head: int = 64,
    n_head: int = 4,
    n_head_kv: int = 1,
    window: int = 128,
    n_embd: int = 128,
    n_ff: int = 192,
    n_ctx: int = 4096,
    seed: int = 1,
) -> Path:
    """Sliding windows on all layers but every sixth (arch gemma3): two caches."""
    writer = gguf.GGUFWriter(path, "gemma3")
    _common(writer, n_layer, n_embd, n_ctx)
    _heads(writer, n_head, n_head_kv, n_ff, head)
    writer.add_sliding_window(window)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.tied_ends(n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            weights.vector(f"{block}.{norm}", n_embd)
        weights.vector(f"{block}.attn_q_norm", head, value=1.5)
        weights.vector(f"{block}.attn_k_norm", head)
        weights.attention(block, n_embd, n_head, n_head_kv, head)
        _ffn(weights, block, n_embd, n_ff)
    return _finish(writer, path)


def hybrid(
    path: Path,
    *,
    attention_layers: Sequence[int] = (2, 5, 8, 10),
    n_layer: int = 12,
    head: int = 64,
    n_head: int = 2,
    n_head_kv: int = 1,
    n_ff: int = 192,
    n_ctx: int = 4096,
    seed: int = 1,
) -> Path:
    """Short convolutions with attention in between (arch lfm2): only some layers own KV."""
    n_embd, n_conv = n_head * head, 3
    writer = gguf.GGUFWriter(path, "lfm2")
    _common(writer, n_layer, n_embd, n_ctx)
    writer.add_head_count(n_head)
    writer.add_head_count_kv([n_head_kv if layer in attention_layers else 0 for layer in range(n_layer)])
    writer.add_feed_forward_length(n_ff)
    writer.add_uint32("lfm2.shortconv.l_cache", n_conv)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.matrix("token_embd", N_VOCAB, n_embd, gain=np.sqrt(n_embd))
    weights.vector("token_embd_norm", n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        weights.vector(f"{block}.attn_norm", n_embd)
        weights.vector(f"{block}.ffn_norm", n_embd)
        if layer in attention_layers:
            weights.vector(f"{block}.attn_q_norm", head)
            weights.vector(f"{block}.attn_k_norm", head)
            weights.attention(block, n_embd, n_head, n_head_kv, head)
        else:
            weights.matrix(f"{block}.shortconv.conv", n_embd, n_conv)
            weights.matrix(f"{block}.shortconv.in_proj", 3 * n_embd, n_embd)
            weights.matrix(f"{block}.shortconv.out_proj", n_embd, n_embd)
        _ffn(weights, block, n_embd, n_ff)
    return _finish(writer, path)


def soft_cap(
    path: Path,
    *,
    n_layer: int = 4,
    head: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    cap: float = 3.0,
    window: int = 128,
    n_embd: int = 128,
    n_ff: int = 192,
    n_ctx: int = 4096,
    seed: int = 1,
) -> Path:
    """Attention logits go through a tanh (arch gemma2). ``cap`` is low, so that it acts on most of them."""
    writer = gguf.GGUFWriter(path, "gemma2")
    _common(writer, n_layer, n_embd, n_ctx)
    _heads(writer, n_head, n_head_kv, n_ff, head)
    writer.add_sliding_window(window)
    writer.add_attn_logit_softcapping(cap)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.tied_ends(n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            weights.vector(f"{block}.{norm}", n_embd)
        weights.attention(block, n_embd, n_head, n_head_kv, head, gain=1.5)
        _ffn(weights, block, n_embd, n_ff)
    return _finish(writer, path)


def sinks(
    path: Path,
    *,
    n_layer: int = 4,
    head: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    window: int = 128,
    n_expert: int = 2,
    n_embd: int = 128,
    n_ff: int = 64,
    n_ctx: int = 4096,
    seed: int = 1,
) -> Path:
    """Every query head has a logit of its own in the softmax (arch gpt-oss)."""
    writer = gguf.GGUFWriter(path, "gpt-oss")
    _common(writer, n_layer, n_embd, n_ctx)
    _heads(writer, n_head, n_head_kv, n_ff)
    writer.add_expert_feed_forward_length(n_ff)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(1)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_sliding_window(window)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.ends(n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "post_attention_norm"):
            weights.vector(f"{block}.{norm}", n_embd)
        weights.attention(block, n_embd, n_head, n_head_kv, head, gain=1.5)
        weights.vector(f"{block}.attn_output", n_embd, "bias", 0.0)
        weights.vector(f"{block}.attn_sinks", n_head, value=2.0)
        weights.matrix(f"{block}.ffn_gate_inp", n_expert, n_embd)
        weights.vector(f"{block}.ffn_gate_inp", n_expert, "bias", 0.0)
        for name, rows, row in (("gate", n_ff, n_embd), ("up", n_ff, n_embd), ("down", n_embd, n_ff)):
            weights.matrix(f"{block}.ffn_{name}_exps", n_expert, rows, row)
            bias = 0.1 * weights.rng.standard_normal((n_expert, rows))
            writer.add_tensor(f"{block}.ffn_{name}_exps.bias", bias.astype(np.float32))
    return _finish(writer, path)


def shared_kv(
    path: Path,
    *,
    n_layer: int = 6,
    n_shared: int = 2,
    head: int = 128,
    head_window: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    window: int = 128,
    n_embd: int = 128,
    n_ff: int = 192,
    n_ctx: int = 4096,
    seed: int = 1,
) -> Path:
    """The last layers read the cache of earlier ones; every other layer has a window and smaller heads (arch gemma4)."""
    writer = gguf.GGUFWriter(path, "gemma4")
    _common(writer, n_layer, n_embd, n_ctx)
    _heads(writer, n_head, n_head_kv, n_ff, head)
    writer.add_uint32("gemma4.attention.key_length_swa", head_window)
    writer.add_uint32("gemma4.attention.value_length_swa", head_window)
    writer.add_uint32("gemma4.attention.shared_kv_layers", n_shared)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    writer.add_uint32("gemma4.rope.dimension_count_swa", head_window)
    writer.add_sliding_window(window)
    in_window = [layer % 2 == 0 for layer in range(n_layer)]
    writer.add_array("gemma4.attention.sliding_window_pattern", in_window)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.tied_ends(n_embd)
    writer.add_tensor("rope_freqs.weight", np.ones(head // 2, np.float32))
    for layer in range(n_layer):
        block = f"blk.{layer}"
        d = head_window if in_window[layer] else head
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            weights.vector(f"{block}.{norm}", n_embd)
        weights.vector(f"{block}.attn_q_norm", d, value=2.0 / np.sqrt(d))
        weights.matrix(f"{block}.attn_q", n_head * d, n_embd)
        if layer < n_layer - n_shared:
            weights.vector(f"{block}.attn_k_norm", d)
            weights.matrix(f"{block}.attn_k", n_head_kv * d, n_embd)
            weights.matrix(f"{block}.attn_v", n_head_kv * d, n_embd)
        weights.matrix(f"{block}.attn_output", n_embd, n_head * d)
        _ffn(weights, block, n_embd, n_ff)
    return _finish(writer, path)


def fused(
    path: Path,
    *,
    n_layer: int = 4,
    head: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 192,
    n_ctx: int = 4096,
    seed: int = 1,
) -> Path:
    """One matrix makes Q, K and V, which are views of its result (arch phi3); few tensors to a layer."""
    n_embd = n_head * head
    writer = gguf.GGUFWriter(path, "phi3")
    _common(writer, n_layer, n_embd, n_ctx)
    _heads(writer, n_head, n_head_kv, n_ff)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.ends(n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        weights.vector(f"{block}.attn_norm", n_embd)
        weights.matrix(f"{block}.attn_qkv", (n_head + 2 * n_head_kv) * head, n_embd, gain=1.3)
        weights.matrix(f"{block}.attn_output", n_embd, n_embd)
        weights.vector(f"{block}.ffn_norm", n_embd)
        weights.matrix(f"{block}.ffn_up", 2 * n_ff, n_embd)
        weights.matrix(f"{block}.ffn_down", n_embd, n_ff)
    return _finish(writer, path)


def biased(
    path: Path,
    arch: str = "qwen2",
    *,
    fused: bool = False,
    n_rot: int | None = None,
    head: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_layer: int = 3,
    n_ff: int = 192,
    n_ctx: int = 4096,
    seed: int = 1,
) -> Path:
    """Queries, keys and values with a bias; with ``fused`` in one tensor. Arch qwen2, or chatglm, whose RoPE pairs neighbours."""
    n_embd = n_head * head
    writer = gguf.GGUFWriter(path, arch)
    _common(writer, n_layer, n_embd, n_ctx)
    _heads(writer, n_head, n_head_kv, n_ff)
    writer.add_rope_dimension_count(n_rot or head)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.ends(n_embd)
    rows = {"q": n_head * head, "k": n_head_kv * head, "v": n_head_kv * head}
    for layer in range(n_layer):
        block = f"blk.{layer}"
        weights.vector(f"{block}.attn_norm", n_embd)
        weights.vector(f"{block}.ffn_norm", n_embd)
        for side, n in {"qkv": sum(rows.values())}.items() if fused else rows.items():
            weights.matrix(f"{block}.attn_{side}", n, n_embd, gain=1.5)
            weights.vector(f"{block}.attn_{side}", n, "bias", 0.5)
        weights.matrix(f"{block}.attn_output", n_embd, n_head * head)
        if arch == "chatglm":  # gate and up in one
            weights.matrix(f"{block}.ffn_up", 2 * n_ff, n_embd)
            weights.matrix(f"{block}.ffn_down", n_embd, n_ff)
        else:
            _ffn(weights, block, n_embd, n_ff)
    return _finish(writer, path)


def normed_rows(path: Path, *, head: int = 64, n_head: int = 4, n_head_kv: int = 2, n_layer: int = 3, n_ff: int = 192, n_ctx: int = 4096, seed: int = 1) -> Path:
    """Norms over all heads of queries and of keys together, with a weight for each channel (arch olmo2)."""
    n_embd = n_head * head
    writer = gguf.GGUFWriter(path, "olmo2")
    _common(writer, n_layer, n_embd, n_ctx)
    _heads(writer, n_head, n_head_kv, n_ff)
    writer.add_layer_norm_rms_eps(1e-5)
    weights = _Weights(writer, seed)
    weights.ends(n_embd)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        weights.attention(block, n_embd, n_head, n_head_kv, head)
        weights.vector(f"{block}.attn_q_norm", n_head * head, value=1.5)
        weights.vector(f"{block}.attn_k_norm", n_head_kv * head)
        weights.vector(f"{block}.post_attention_norm", n_embd)
        weights.vector(f"{block}.post_ffw_norm", n_embd)
        _ffn(weights, block, n_embd, n_ff)
    return _finish(writer, path)
