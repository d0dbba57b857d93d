"""A Llama-type GGUF file as a Hugging Face folder in fp32 (config.json, model.safetensors), for speculators and transformers.

Read with the `gguf` package, so that dspark's own reader is not its own judge. fp32 keeps the dequantised numbers as they are:
dspark computes on the very same ones.
"""
import hashlib
import os
import shutil

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(name):
    name = name.removesuffix(".weight")
    if not name.startswith("blk."):
        return TOP[name] + ".weight"
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def halves(w, heads):
    """llama.cpp's files interleave the rotary pairs of q and k; Hugging Face keeps them as two halves."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)


def convert(gguf, out):
    reader = GGUFReader(gguf)
    field = lambda key: reader.fields[key].contents()
    if field("general.architecture") != "llama":
        raise SystemExit(f"{gguf}: architecture {field('general.architecture')}; this converter knows llama only")
    at = lambda key: field("llama." + key)
    heads, kv_heads = at("attention.head_count"), at("attention.head_count_kv")
    weights = {}
    for t in reader.tensors:
        w = dequantize(t.data, t.tensor_type).astype(np.float32)
        name = hf_name(t.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            w = halves(w, heads if "q_proj" in name else kv_heads)
        weights[name] = torch.from_numpy(np.array(w))
    tied = "lm_head.weight" not in weights
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(weights["model.embed_tokens.weight"]), hidden_size=at("embedding_length"), intermediate_size=at("feed_forward_length"),
        num_hidden_layers=at("block_count"), num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=at("context_length"),
        rms_norm_eps=at("attention.layer_norm_rms_epsilon"), rope_parameters={"rope_type": "default", "rope_theta": at("rope.freq_base")},
        tie_word_embeddings=tied, attn_implementation="eager"))
    model.load_state_dict(weights)
    model.save_pretrained(out)


def target_folder(gguf, cache):
    """The converted folder, made once for each file."""
    with open(gguf, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    out = os.path.join(cache, "target-" + digest[:16])
    if not os.path.exists(out):
        work = f"{out}.{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        convert(gguf, work)
        os.rename(work, out)
    return out
