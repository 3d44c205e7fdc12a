"""A tiny model as a GGUF file, written by the package `gguf` as llama.cpp's converter writes one."""

import json
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS = 64, 2, 4, 2


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a query or key projection in llama.cpp's order (convert_hf_to_gguf.py, `permute`)."""
    halves = weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def unpermuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows in transformers' order again."""
    pairs = weights.reshape(heads, len(weights) // heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path, tokenizer: Any, *, architecture: str = "llama", without: str = "") -> Path:
    """Write a Llama with random weights in Q4_1 (attention), Q8_0 (rest) and F32 (norms), and return the path.

    Args:
        path: The file.
        tokenizer: A byte-level BPE tokenizer, which becomes the file's.
        architecture: What the file says that it is.
        without: A tensor that is left out.
    """
    import gguf

    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_name("Tiny Test")
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokenizer))
    _add_tokenizer(writer, tokenizer)
    for name, rows in _shapes(len(tokenizer)).items():
        if name == without:
            continue
        if "norm" in name:
            writer.add_tensor(name, rng.uniform(0.5, 1.5, rows).astype(np.float32))
            continue
        kind = gguf.GGMLQuantizationType.Q4_1 if "attn" in name else gguf.GGMLQuantizationType.Q8_0
        weights = rng.normal(0, 0.1, (rows, HIDDEN)).astype(np.float32)
        if heads := {"q": HEADS, "k": KV_HEADS}.get(name.partition("attn_")[2].partition(".")[0]):
            weights = permuted(weights, heads)
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(vocabulary: int) -> dict[str, int]:
    """Return the rows of each tensor."""
    shapes = {"token_embd.weight": vocabulary, "output_norm.weight": HIDDEN}
    for layer in range(LAYERS):
        rows = {"attn_q": HIDDEN, "attn_k": HIDDEN * KV_HEADS // HEADS, "attn_v": HIDDEN * KV_HEADS // HEADS}
        rows |= dict.fromkeys(("attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_norm", "ffn_norm"), HIDDEN)
        shapes |= {f"blk.{layer}.{name}.weight": count for name, count in rows.items()}
    return shapes


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import gguf

    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
