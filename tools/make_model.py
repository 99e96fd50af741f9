#!/usr/bin/env python3
"""Random-weight BF16 checkpoint of the Qwen3.5/3.6 architecture (MoE or dense) or of Qwen3-Next, any size, in the HF layout.

usage: make_model.py OUT --preset mid            0.5 GB, 8 layers, for quick benchmarks and CI
       make_model.py OUT --preset wide4          10.5 GB, every width of Qwen3.6-35B-A3B, 4 layers (LLLF) + MTP
       make_model.py OUT --preset full           72 GB, the shapes of the real model
Any field of the preset can be overridden (--layers 8 --experts 64 ...); --dry-run prints the plan only.

Layouts: --dense (qwen3_5, MLP width --inter), --next (qwen3_next: interleaved in_proj_qkvz and in_proj_ba), --tied,
--split-experts (one tensor per expert and projection), --f32-vectors (A_log and the gated norm in F32), --no-vision (text
only), --no-mtp.  They change how weights are stored, not what the values are: with one seed, --next, --split-experts,
--f32-vectors and --no-vision give the same model as the plain layout.

Needs numpy.  Writes tensor by tensor: peak memory is about 0.3 GB at any size (--split-experts holds one fused tensor more).  Deterministic in --seed
(for one numpy version): one block of 8 Mi normal values is drawn once; every chunk of every tensor is a
slice of it at its own random offset, with its own random signs.  Values therefore repeat, rows do not.

The weights are random but not meaningless.  Token t is always followed by next(t), one fixed cycle through
the ordinary tokens: the head's row next(t) is the embedding of t, and the residual branches are small.  The
MTP block knows next(t) for a share --accept of the tokens and draws a wrong draft for the others, so
greedy speculative decoding accepts each draft with about that probability, as on a trained model.
"""
import argparse, json, os, shutil, sys, time, zlib
import numpy as np

PRESETS = dict(
    mid=dict(layers=8, hidden=768, vocab=8192, heads=8, kv_heads=2, head_dim=256, lin_k_heads=8, lin_v_heads=16, lin_dim=128,
             experts=32, topk=4, moe_inter=256, vis_depth=2, vis_hidden=128, vis_inter=272, vis_heads=2, vis_pos=256),
    wide4=dict(layers=4, hidden=2048, vocab=248320, heads=16, kv_heads=2, head_dim=256, lin_k_heads=16, lin_v_heads=32, lin_dim=128,
               experts=256, topk=8, moe_inter=512, vis_depth=2, vis_hidden=1152, vis_inter=4304, vis_heads=16, vis_pos=2304))
PRESETS["full"] = dict(PRESETS["wide4"], layers=40, vis_depth=27)
BLOCK, CHUNK = 8 << 20, 2 << 20
TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "assets", "qwen36-tiny")


def bf16(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


# --- the list of tensors: (name, shape, kind, std) ---------------------------
def layer(c, p, full):
    H, E, I = c.hidden, c.experts, c.moe_inter
    out = 1 / (2 * max(c.layers, 4)) ** 0.5            # keeps the sum of all residual branches below the embedding
    lin = lambda n, o, i, k=1.0: (p + n, [o, i], "normal", k * i ** -0.5)
    t = [(p + "input_layernorm.weight", [H], "norm0", .05)]
    if full:
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        t += [lin("self_attn.q_proj.weight", 2 * q, H), lin("self_attn.k_proj.weight", kv, H), lin("self_attn.v_proj.weight", kv, H),
              lin("self_attn.o_proj.weight", H, q, out), (p + "self_attn.q_norm.weight", [c.head_dim], "norm0", .05),
              (p + "self_attn.k_norm.weight", [c.head_dim], "norm0", .05)]
    else:
        kd, vd, a = c.lin_k_heads * c.lin_dim, c.lin_v_heads * c.lin_dim, "linear_attn."
        t += [lin(a + "in_proj_qkv.weight", 2 * kd + vd, H), lin(a + "in_proj_z.weight", vd, H), lin(a + "in_proj_b.weight", c.lin_v_heads, H),
              lin(a + "in_proj_a.weight", c.lin_v_heads, H), (p + a + "conv1d.weight", [2 * kd + vd, 1, 4], "normal", .5),
              (p + a + "A_log", [c.lin_v_heads], "A_log", 0), (p + a + "dt_bias", [c.lin_v_heads], "dt_bias", 0),
              (p + a + "norm.weight", [c.lin_dim], "norm1", .05), lin(a + "out_proj.weight", H, vd, out)]
    m = "mlp."
    t += [(p + "post_attention_layernorm.weight", [H], "norm0", .05)]
    if c.dense:
        return t + [lin(m + "gate_proj.weight", c.inter, H), lin(m + "up_proj.weight", c.inter, H), lin(m + "down_proj.weight", H, c.inter, out)]
    t += [lin(m + "gate.weight", E, H),
          (p + m + "experts.gate_up_proj", [E, 2 * I, H], "normal", H ** -0.5), (p + m + "experts.down_proj", [E, H, I], "normal", out * I ** -0.5),
          lin(m + "shared_expert.gate_proj.weight", I, H), lin(m + "shared_expert.up_proj.weight", I, H),
          lin(m + "shared_expert.down_proj.weight", H, I, out), lin(m + "shared_expert_gate.weight", 1, H)]
    return t


def prefix(c): return "model." if c.no_vision or c.next else "model.language_model."


def tensors(c):
    H, p = c.hidden, prefix(c)
    t = [(p + "embed_tokens.weight", [c.vocab, H], "embed", 1.0)]
    for i in range(c.layers): t += layer(c, f"{p}layers.{i}.", i % 4 == 3)
    t += [(p + "norm.weight", [H], "norm0", .05)] + ([] if c.tied else [("lm_head.weight", [c.vocab, H], "head", .02)])
    if not c.no_mtp:
        t += [("mtp.fc.weight", [H, 2 * H], "fc", .2 * (2 * H) ** -0.5)] + layer(c, "mtp.layers.0.", True)
        t += [(f"mtp.{n}.weight", [H], "norm0", .05) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")]
    if not (c.no_vision or c.next):
        h, f, v = c.vis_hidden, c.vis_inter, "model.visual."
        def pair(n, o, *i): return [(v + n + ".weight", [o, *i], "normal", int(np.prod(i)) ** -0.5), (v + n + ".bias", [o], "normal", .02)]
        def ln(n, d): return [(v + n + ".weight", [d], "norm1", .05), (v + n + ".bias", [d], "normal", .02)]
        t += pair("patch_embed.proj", h, 3, 2, 16, 16) + [(v + "pos_embed.weight", [c.vis_pos, h], "normal", .02)]
        for b in (f"blocks.{i}." for i in range(c.vis_depth)):
            t += ln(b + "norm1", h) + ln(b + "norm2", h) + pair(b + "attn.qkv", 3 * h, h) + pair(b + "attn.proj", h, h)
            t += pair(b + "mlp.linear_fc1", f, h) + pair(b + "mlp.linear_fc2", h, f)
        t += ln("merger.norm", h) + pair("merger.linear_fc1", 4 * h, 4 * h) + pair("merger.linear_fc2", H, 4 * h)
    return t


# --- how they are stored: (name, dtype, shape, values) -----------------------
def stored(c, src, t):
    """The tensors that a file holds for t; values is a function that yields arrays."""
    name, shape, kind, std = t
    same = lambda n=name, s=shape, d="BF16", f=None: (n, d, s, f or (lambda: src.chunks(*t)))
    whole = lambda u: np.concatenate([x.ravel() for x in src.chunks(*u)]).reshape(u[1])
    if c.f32_vectors and name.endswith((".A_log", ".linear_attn.norm.weight")):
        return [same(d="F32", f=lambda: ((x.astype(np.uint32) << 16) for x in src.chunks(*t)))]
    if c.split_experts and ".experts." in name:
        base, E, I = name[:name.rindex(".")], shape[0], c.moe_inter
        out = []
        for e in range(E):
            part = lambda e=e, a=0, b=shape[1]: [np.ascontiguousarray(cached(src, t, whole)[e, a:b])]
            if name.endswith("gate_up_proj"):
                out += [(f"{base}.{e}.gate_proj.weight", "BF16", [I, c.hidden], lambda part=part: part(a=0, b=I)),
                        (f"{base}.{e}.up_proj.weight", "BF16", [I, c.hidden], lambda part=part: part(a=I, b=2 * I))]
            else: out.append((f"{base}.{e}.down_proj.weight", "BF16", [c.hidden, I], part))
        return out
    if c.next and ".linear_attn.in_proj_" in name:
        other = lambda k, rows: (name.replace(name.split("in_proj_")[1], k + ".weight"), [rows, c.hidden], kind, std)
        kh, r, d = c.lin_k_heads, c.lin_v_heads // c.lin_k_heads, c.lin_dim
        if name.endswith("in_proj_qkv.weight"):               # per key head: q, k, its value heads' v, their z
            def qkvz():
                w, z = whole(t), whole(other("z", c.lin_v_heads * d)); k = kh * d
                yield np.concatenate([w[:k].reshape(kh, d, -1), w[k:2 * k].reshape(kh, d, -1), w[2 * k:].reshape(kh, r * d, -1), z.reshape(kh, r * d, -1)], 1)
            return [same(name.replace("qkv.", "qkvz."), [2 * kh * d + 2 * c.lin_v_heads * d, c.hidden], f=qkvz)]
        if name.endswith("in_proj_b.weight"):
            def ba(): yield np.concatenate([whole(u).reshape(kh, r, -1) for u in (t, other("a", c.lin_v_heads))], 1)
            return [same(name.replace("_b.", "_ba."), [2 * c.lin_v_heads, c.hidden], f=ba)]
        return []
    return [same()]


def cached(src, t, whole):
    """One whole tensor is kept, because its experts are asked for one after another."""
    if getattr(src, "cache", (None,))[0] != t[0]: src.cache = t[0], whole(t)
    return src.cache[1]


# --- values ------------------------------------------------------------------
class Source:
    def __init__(self, c, ordinary):
        self.c, self.block = c, np.random.default_rng(c.seed).standard_normal(BLOCK, dtype=np.float32)
        self.sign = np.random.default_rng(c.seed + 1).integers(0, 2, BLOCK, dtype=np.uint16) << 15
        self.scaled = {}
        r, V = np.random.default_rng(c.seed + 2), c.vocab
        order = r.permutation(ordinary)                       # one cycle through the ordinary tokens
        self.prev = np.full(V, -1); self.prev[np.roll(order, -1)] = order
        self.at, self.alone = r.integers(0, BLOCK - c.hidden, (2, V))
        self.hard = r.random(V) >= c.accept                   # tokens whose successor the MTP block cannot see

    def rows(self, at, hard, std):
        H = self.c.hidden; s = np.full((2, H), 2 ** 0.5 * std, np.float32)
        s[0, H // 2:] *= .01; s[1, :H // 2] *= .01            # easy tokens live in the first half, hard ones in the second
        return bf16(np.lib.stride_tricks.sliding_window_view(self.block, H)[at] * s[hard.astype(int)])

    def chunks(self, name, shape, kind, std):
        what = name.replace(prefix(self.c), "model.language_model.", 1) if name.startswith(prefix(self.c)) else name
        n, r = int(np.prod(shape)), np.random.default_rng([self.c.seed, zlib.crc32(what.encode())])
        if kind in ("embed", "head"):
            for a in range(0, shape[0], 2048):
                i = np.arange(a, min(a + 2048, shape[0]))
                if kind == "embed": yield self.rows(self.at[i], self.hard[i], std)
                else:
                    src = self.prev[i]
                    yield self.rows(np.where(src < 0, self.alone[i], self.at[src]), self.hard[src] & (src >= 0), std)
        elif kind in ("norm0", "norm1"): yield bf16((kind == "norm1") + std * r.standard_normal(n, dtype=np.float32))
        elif kind == "A_log": yield bf16(np.log(r.uniform(.05, 16, n)))
        elif kind == "dt_bias":
            dt = np.exp(r.uniform(np.log(1e-3), np.log(.1), n)); yield bf16(dt + np.log(-np.expm1(-dt)))
        else:
            if std not in self.scaled:
                if len(self.scaled) > 11: self.scaled.clear()
                self.scaled[std] = bf16(self.block * np.float32(std))
            b = self.scaled[std]
            for a in range(0, n, CHUNK):
                m = min(CHUNK, n - a); i, j = r.integers(0, BLOCK - m + 1, 2)
                x = b[i:i + m] ^ self.sign[j:j + m]
                if kind == "fc":                              # fc passes the first half of the embedding on
                    k = np.arange(shape[0] // 2) * (shape[1] + 1) - a
                    x[k[(k >= 0) & (k < m)]] = 0x3F80
                yield x


# --- files -------------------------------------------------------------------
def config(c, ids):
    n = c.head_dim // 8                                       # rotary pairs: a quarter of the head
    base = "qwen3_next" if c.next else "qwen3_5" if c.dense else "qwen3_5_moe"
    model = "Qwen3Next" if c.next else "Qwen3_5" if c.dense else "Qwen3_5Moe"
    text = dict(model_type=base + ("" if c.next else "_text"), vocab_size=c.vocab, hidden_size=c.hidden, num_hidden_layers=c.layers, full_attention_interval=4,
                layer_types=[("linear" if i % 4 < 3 else "full") + "_attention" for i in range(c.layers)],
                num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, attn_output_gate=True, attention_bias=False,
                attention_dropout=0.0, hidden_act="silu", rms_norm_eps=1e-6, linear_num_key_heads=c.lin_k_heads, linear_num_value_heads=c.lin_v_heads,
                linear_key_head_dim=c.lin_dim, linear_value_head_dim=c.lin_dim, linear_conv_kernel_dim=4, num_experts=c.experts,
                num_experts_per_tok=c.topk, moe_intermediate_size=c.moe_inter, shared_expert_intermediate_size=c.moe_inter,
                router_aux_loss_coef=0.001, output_router_logits=False, max_position_embeddings=262144, partial_rotary_factor=0.25,
                rope_parameters=dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25, mrope_interleaved=True,
                                     mrope_section=[(n + 2) // 3, (n + 1) // 3, n // 3]),
                mamba_ssm_dtype="float32", mtp_num_hidden_layers=0 if c.no_mtp else 1, mtp_use_dedicated_embeddings=False,
                bos_token_id=None, pad_token_id=None, eos_token_id=ids["<|endoftext|>"], initializer_range=0.02, dtype="bfloat16",
                use_cache=True, tie_word_embeddings=c.tied)
    if c.dense:
        for k in [k for k in text if "expert" in k or "router" in k or k.startswith("moe_")]: del text[k]
        text["intermediate_size"] = c.inter
    if c.next:
        rope = text.pop("rope_parameters")
        text.update(rope_theta=rope["rope_theta"], rope_scaling=None, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    if c.no_vision or c.next: return dict(text, architectures=[model + "ForCausalLM"])
    vision = dict(model_type=base + "_vision", depth=c.vis_depth, hidden_size=c.vis_hidden, num_heads=c.vis_heads,
                  intermediate_size=c.vis_inter, hidden_act="gelu_pytorch_tanh", in_channels=3, patch_size=16, temporal_patch_size=2,
                  spatial_merge_size=2, num_position_embeddings=c.vis_pos, out_hidden_size=c.hidden, deepstack_visual_indexes=[],
                  initializer_range=0.02, dtype="bfloat16")
    return dict(architectures=[model + "ForConditionalGeneration"], model_type=base, dtype="bfloat16", tie_word_embeddings=c.tied,
                image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
                vision_end_token_id=ids["<|vision_end|>"], text_config=text, vision_config=vision)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("out"); a.add_argument("--preset", choices=PRESETS, default="mid")
    for k in PRESETS["mid"]: a.add_argument("--" + k.replace("_", "-"), type=int)
    a.add_argument("--no-vision", action="store_true", help="text-only layout (Qwen3_5MoeForCausalLM)")
    for k, h in (("dense", "an MLP instead of experts"), ("next", "layout of Qwen3-Next"), ("tied", "no lm_head"), ("split-experts", "a tensor per expert"),
                 ("f32-vectors", "A_log and linear_attn.norm in F32")): a.add_argument("--" + k, action="store_true", help=h)
    a.add_argument("--inter", type=int, help="width of the dense MLP (4 x hidden)")
    a.add_argument("--no-mtp", action="store_true"); a.add_argument("--seed", type=int, default=0)
    a.add_argument("--accept", type=float, default=.8, help="share of tokens whose successor the MTP block knows (0.8)")
    a.add_argument("--tokenizer", default=TINY, help="model directory whose tokenizer.json is copied")
    a.add_argument("--shard-gb", type=float, help="shard size in GB (a quarter of the model, at most 4)"); a.add_argument("--dry-run", action="store_true")
    c = a.parse_args()
    for k, v in PRESETS[c.preset].items():
        if getattr(c, k) is None: setattr(c, k, v)
    c.inter = c.inter or 4 * c.hidden
    if c.dense and c.next: a.error("--dense and --next exclude each other")
    if c.layers % 4 or c.lin_v_heads % c.lin_k_heads or c.heads % c.kv_heads or c.topk > c.experts or c.head_dim % 8 or c.vis_hidden % c.vis_heads:
        a.error("need: layers a multiple of 4, v heads of k heads, heads of kv heads, head_dim of 8, topk <= experts")

    ids = {n: c.vocab - 26 + i for i, n in ((0, "<|endoftext|>"), (2, "<|im_end|>"), (9, "<|vision_start|>"), (10, "<|vision_end|>"), (12, "<|image_pad|>"), (13, "<|video_pad|>"))}
    tok, ordinary = os.path.join(c.tokenizer, "tokenizer.json"), c.vocab - 26
    if os.path.exists(tok):
        t = json.load(open(tok)); top = 1 + max([x["id"] for x in t["added_tokens"]] + list(t["model"]["vocab"].values()))
        if top <= c.vocab: ordinary = len(t["model"]["vocab"]); ids.update({x["content"]: x["id"] for x in t["added_tokens"]})
        else: tok = None
    else: tok = None
    if not tok: print("no tokenizer copied: none fits this vocabulary", file=sys.stderr)

    src = None if c.dry_run else Source(c, ordinary)
    plan = [x for t in tensors(c) for x in stored(c, src, t)]
    size = lambda t: (4 if t[1] == "F32" else 2) * int(np.prod(t[2])); total = sum(map(size, plan))
    limit = int(1e9 * (c.shard_gb or min(4, total / 4e9))); shards, at = [[]], 0
    for t in plan:
        if at and at + size(t) > limit: shards.append([]); at = 0
        shards[-1].append(t); at += size(t)
    print(f"{len(plan)} tensors, {total/2e9:.3f} G parameters, {total/1e9:.3f} GB in {len(shards)} shards")
    if c.dry_run: return

    os.makedirs(c.out, exist_ok=True); t0, where = time.time(), {}
    for i, s in enumerate(shards):
        f, head, off = f"model-{i+1:05d}-of-{len(shards):05d}.safetensors", {"__metadata__": {"format": "pt"}}, 0
        for t in s:
            head[t[0]] = dict(dtype=t[1], shape=t[2], data_offsets=[off, off + size(t)]); off += size(t); where[t[0]] = f
        j = json.dumps(head, separators=(",", ":")).encode(); j += b" " * (-len(j) % 8)
        with open(os.path.join(c.out, f), "wb") as o:
            o.write(len(j).to_bytes(8, "little") + j)
            for t in s:
                for x in t[3](): o.write(np.ascontiguousarray(x).data)
            if o.tell() != 8 + len(j) + off: sys.exit(f"{f}: wrote {o.tell()} bytes, expected {8 + len(j) + off}")
    def dump(name, d):
        with open(os.path.join(c.out, name), "w") as o: json.dump(d, o, indent=2); o.write("\n")
    dump("model.safetensors.index.json", dict(metadata=dict(total_size=total), weight_map=dict(sorted(where.items()))))
    dump("config.json", config(c, ids))
    e = ids["<|endoftext|>"]
    dump("generation_config.json", dict(bos_token_id=e, do_sample=True, eos_token_id=[ids["<|im_end|>"], e], pad_token_id=e, temperature=1.0, top_k=20, top_p=0.95))
    if tok: shutil.copyfile(tok, os.path.join(c.out, "tokenizer.json"))
    dt = time.time() - t0; print(f"{c.out}: {dt:.1f} s, {total/1e6/dt:.0f} MB/s")


if __name__ == "__main__":
    main()
