#!/usr/bin/env python3
"""Write the file layout of a quantized Qwen3.6-35B-A3B export with sparse data: real headers and index, no weights.

usage: make_sparse.py DIR [--layers N] [--experts N] [--shard-size BYTES]

The names, shapes and dtypes are those of an NVFP4 export (split experts, BF16 draft head with fused experts, vision
tower, FP8 KV scales); tensors go to shards in model order and lie in each shard as safetensors writes them (wide dtypes
first, then by name). The data is never written (the files are grown with truncate), so 23 GB take about 20 MB of disk.
Only for opening: every weight reads as zero.
"""
import argparse
import json
import os
import struct

SIZE = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
RANK = {"F32": 0, "BF16": 1, "F8_E4M3": 2, "U8": 3}
H, VOCAB, INTER, HEADS, KV_HEADS, HEAD_DIM = 2048, 248320, 512, 16, 2, 256
QKV_DIM, VALUE_DIM, V_HEADS, CONV = 8192, 4096, 32, 4
VISION, VISION_INTER, VISION_BLOCKS, MERGED = 1152, 4304, 27, 4608


def bf16(name, *shape):
    return name, "BF16", shape


def nvfp4(name, rows, cols):
    yield f"{name}.weight", "U8", (rows, cols // 2)
    yield f"{name}.weight_scale", "F8_E4M3", (rows, cols // 16)
    yield f"{name}.weight_scale_2", "F32", ()
    yield f"{name}.input_scale", "F32", ()


def gdn(p):
    yield bf16(p + "A_log", V_HEADS)
    yield bf16(p + "conv1d.weight", QKV_DIM, 1, CONV)
    yield bf16(p + "dt_bias", V_HEADS)
    yield bf16(p + "in_proj_a.weight", V_HEADS, H)
    yield bf16(p + "in_proj_b.weight", V_HEADS, H)
    yield from nvfp4(p + "in_proj_qkv", QKV_DIM, H)
    yield from nvfp4(p + "in_proj_z", VALUE_DIM, H)
    yield bf16(p + "norm.weight", 128)
    yield from nvfp4(p + "out_proj", H, VALUE_DIM)


def attention(p, linear):
    yield from linear(p + "q_proj", 2 * HEADS * HEAD_DIM, H)
    yield from linear(p + "k_proj", KV_HEADS * HEAD_DIM, H)
    yield from linear(p + "v_proj", KV_HEADS * HEAD_DIM, H)
    yield from linear(p + "o_proj", H, HEADS * HEAD_DIM)
    yield bf16(p + "q_norm.weight", HEAD_DIM)
    yield bf16(p + "k_norm.weight", HEAD_DIM)


def plain(name, rows, cols):
    yield bf16(name + ".weight", rows, cols)


def ffn(p, experts, linear):
    yield bf16(p + "gate.weight", experts, H)
    yield bf16(p + "shared_expert_gate.weight", 1, H)
    yield from linear(p + "shared_expert.gate_proj", INTER, H)
    yield from linear(p + "shared_expert.up_proj", INTER, H)
    yield from linear(p + "shared_expert.down_proj", H, INTER)


def layer(i, experts):
    p = f"model.language_model.layers.{i}."
    yield bf16(p + "input_layernorm.weight", H)
    yield bf16(p + "post_attention_layernorm.weight", H)
    if i % 4 == 3:
        yield from attention(p + "self_attn.", nvfp4)
        yield p + "self_attn.k_proj.k_scale", "F32", ()
        yield p + "self_attn.v_proj.v_scale", "F32", ()
    else:
        yield from gdn(p + "linear_attn.")
    yield from ffn(p + "mlp.", experts, nvfp4)
    for e in range(experts):
        yield from nvfp4(f"{p}mlp.experts.{e}.gate_proj", INTER, H)
        yield from nvfp4(f"{p}mlp.experts.{e}.up_proj", INTER, H)
        yield from nvfp4(f"{p}mlp.experts.{e}.down_proj", H, INTER)


def mtp(experts):
    p = "mtp.layers.0."
    yield bf16("mtp.fc.weight", H, 2 * H)
    for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", p + "input_layernorm",
                 p + "post_attention_layernorm"):
        yield bf16(name + ".weight", H)
    yield from attention(p + "self_attn.", plain)
    yield from ffn(p + "mlp.", experts, plain)
    yield bf16(p + "mlp.experts.gate_up_proj", experts, 2 * INTER, H)
    yield bf16(p + "mlp.experts.down_proj", experts, H, INTER)


def vision():
    p = "model.visual."

    def pair(name, *shape):
        yield bf16(p + name + ".weight", *shape)
        yield bf16(p + name + ".bias", shape[0])

    yield from pair("patch_embed.proj", VISION, 3, 2, 16, 16)
    yield bf16(p + "pos_embed.weight", 2304, VISION)
    for i in range(VISION_BLOCKS):
        b = f"blocks.{i}."
        yield from pair(b + "norm1", VISION)
        yield from pair(b + "norm2", VISION)
        yield from pair(b + "attn.qkv", 3 * VISION, VISION)
        yield from pair(b + "attn.proj", VISION, VISION)
        yield from pair(b + "mlp.linear_fc1", VISION_INTER, VISION)
        yield from pair(b + "mlp.linear_fc2", VISION, VISION_INTER)
    yield from pair("merger.norm", VISION)
    yield from pair("merger.linear_fc1", MERGED, MERGED)
    yield from pair("merger.linear_fc2", H, MERGED)


def tensors(layers, experts):
    yield bf16("model.language_model.embed_tokens.weight", VOCAB, H)
    for i in range(layers):
        yield from layer(i, experts)
    yield bf16("model.language_model.norm.weight", H)
    yield from vision()
    yield bf16("lm_head.weight", VOCAB, H)
    yield from mtp(experts)


def size_of(dtype, shape):
    n = SIZE[dtype]
    for d in shape:
        n *= d
    return n


def split(all_tensors, limit):
    shards, used = [[]], 0
    for t in all_tensors:
        n = size_of(t[1], t[2])
        if used + n > limit and shards[-1]:
            shards.append([])
            used = 0
        shards[-1].append(t)
        used += n
    return shards


def write_shard(path, items):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in sorted(items, key=lambda t: (RANK[t[1]], t[0])):
        end = at + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
    return at


def config(layers, experts):
    text = {
        "model_type": "qwen3_5_moe_text", "vocab_size": VOCAB, "hidden_size": H, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "attn_output_gate": True,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": False,
        "linear_conv_kernel_dim": CONV, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": V_HEADS, "moe_intermediate_size": INTER,
        "shared_expert_intermediate_size": INTER, "num_experts": experts, "num_experts_per_tok": 8,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                            "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        "mtp_num_hidden_layers": 1, "dtype": "bfloat16", "eos_token_id": 248044,
    }
    return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text,
            "vision_config": {"model_type": "qwen3_5_moe", "depth": VISION_BLOCKS, "hidden_size": VISION},
            "tie_word_embeddings": False}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("dir")
    p.add_argument("--layers", type=int, default=40)
    p.add_argument("--experts", type=int, default=256)
    p.add_argument("--shard-size", type=int, default=10**10)
    a = p.parse_args()
    os.makedirs(a.dir, exist_ok=True)
    shards = split(tensors(a.layers, a.experts), a.shard_size)
    weight_map, total = {}, 0
    for i, items in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        total += write_shard(os.path.join(a.dir, name), items)
        weight_map.update((t[0], name) for t in items)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    quant = {"producer": {"name": "modelopt", "version": "0.47.0"},
             "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                              "exclude_modules": ["lm_head", "model.visual*", "mtp*"]}}
    for name, value in (("model.safetensors.index.json", index), ("config.json", config(a.layers, a.experts)),
                        ("hf_quant_config.json", quant)):
        with open(os.path.join(a.dir, name), "w", encoding="utf-8") as f:
            json.dump(value, f, indent=2)
            f.write("\n")
    print(f"{len(weight_map)} tensors, {total} bytes, {len(shards)} shards")


if __name__ == "__main__":
    main()
