"""The oracle: K3 and Kimi-Linear, token by token in NumPy, written from the specification and from nothing in `src`.

Weights carry the released names without prefix, configurations the released fields, so it knows no class of gnomon.
Every step is the plainest form: KDA as a recurrence, MLA on the compressed latent, depth reads as a softmax over a list.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class Oracle:
    """Feed tokens one by one to `step`; `margin` is the smallest gap seen between the last chosen and the first unchosen expert."""

    def __init__(self, config, weights, dtype=np.float64):
        self.config = config
        self.weights = {name: np.asarray(value, dtype=dtype) for name, value in weights.items()}
        self.dtype = dtype
        self.state = [{} for _ in range(config["num_hidden_layers"])]
        self.margin = np.inf

    def step(self, token):
        """One token in, logits [vocab] out."""
        c, w, eps = self.config, self.weights, self.config["rms_norm_eps"]
        block = c.get("attn_res_block_size")
        bank, total = [], w["model.embed_tokens.weight"][token]
        for index in range(c["num_hidden_layers"]):
            layer = f"model.layers.{index}."
            mixed = self.mix([*bank, total], layer + "self_attention_res") if bank else total
            if block and index % block == 0:
                bank.append(total)
                total = np.zeros_like(total)
            x = rms_norm(mixed, w[layer + "input_layernorm.weight"], eps)
            mixer = self.kda if index + 1 in c["linear_attn_config"]["kda_layers"] else self.mla
            total = total + mixer(x, layer + "self_attn.", self.state[index])
            mixed = self.mix([*bank, total], layer + "mlp_res") if block else total
            total = total + self.feed_forward(rms_norm(mixed, w[layer + "post_attention_layernorm.weight"], eps), layer, index)
        out = self.mix([*bank, total], "model.output_attn_res") if block else total
        head = w["model.embed_tokens.weight" if c.get("tie_word_embeddings") else "lm_head.weight"]
        return head @ rms_norm(out, w["model.norm.weight"], eps)

    def mix(self, sources, name):
        values = np.stack(sources)
        keys = rms_norm(values, 1, self.config["rms_norm_eps"])
        scores = keys @ (self.weights[name + "_norm.weight"] * self.weights[name + "_proj.weight"][0])
        p = np.exp(scores - scores.max())
        return (p / p.sum()) @ values

    def kda(self, x, name, state):
        w, c = self.weights, self.config["linear_attn_config"]
        heads, width, taps = c["num_heads"], c["head_dim"], c["short_conv_kernel_size"]
        streams = []
        for which in "qkv":
            past = state.setdefault(which, [np.zeros(heads * width, self.dtype)] * (taps - 1))
            past.append(w[f"{name}{which}_proj.weight"] @ x)
            kernel = w[f"{name}{which}_conv1d.weight"][:, 0, :]
            u = sum(kernel[:, j] * past[j - taps] for j in range(taps))
            streams.append((u * sigmoid(u)).reshape(heads, width))
        q, k, v = streams
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * width**-0.5
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        z = (w[name + "f_b_proj.weight"] @ (w[name + "f_a_proj.weight"] @ x) + w[name + "dt_bias"]).reshape(heads, width)
        rate = np.exp(w[name + "A_log"].reshape(-1)[:heads])[:, None]
        bound = c.get("gate_lower_bound")
        g = bound * sigmoid(rate * z) if bound is not None else -rate * np.logaddexp(0, z)
        beta = sigmoid(w[name + "b_proj.weight"] @ x)[:, None, None]
        S = np.exp(g)[:, :, None] * state.get("S", np.zeros((heads, width, width), self.dtype))
        error = v - np.einsum("hkv,hk->hv", S, k)
        state["S"] = S = S + beta * k[:, :, None] * error[:, None, :]
        o = np.einsum("hkv,hk->hv", S, q)
        if c.get("use_full_rank_gate"):
            gate = w[name + "g_proj.weight"] @ x
        else:
            gate = w[name + "g_b_proj.weight"] @ (w[name + "g_a_proj.weight"] @ x)
        y = rms_norm(o, w[name + "o_norm.weight"], self.config["rms_norm_eps"]).reshape(-1) * sigmoid(gate)
        return w[name + "o_proj.weight"] @ y

    def mla(self, x, name, state):
        w, c = self.weights, self.config
        heads, n, r, d = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        if c.get("q_lora_rank"):
            latent = rms_norm(w[name + "q_a_proj.weight"] @ x, w[name + "q_a_layernorm.weight"], 1e-6)
            q = w[name + "q_b_proj.weight"] @ latent
        else:
            q = w[name + "q_proj.weight"] @ x
        q = q.reshape(heads, n + r)
        row = w[name + "kv_a_proj_with_mqa.weight"] @ x
        rank = c["kv_lora_rank"]
        row = np.concatenate([rms_norm(row[:rank], w[name + "kv_a_layernorm.weight"], 1e-6), row[rank:]])
        cache = state.setdefault("cache", [])
        cache.append(row)
        cache = np.stack(cache)
        kv = w[name + "kv_b_proj.weight"].reshape(heads, n + d, rank)
        out = []
        for h in range(heads):
            query = np.concatenate([kv[h, :n].T @ q[h, :n], q[h, n:]])
            scores = cache @ query * (n + r) ** -0.5
            p = np.exp(scores - scores.max())
            out.append(kv[h, n:] @ ((p / p.sum()) @ cache[:, :rank]))
        o = np.concatenate(out)
        if c.get("mla_use_output_gate"):
            o = o * sigmoid(w[name + "g_proj.weight"] @ x)
        return w[name + "o_proj.weight"] @ o

    def feed_forward(self, x, layer, index):
        w, c = self.weights, self.config
        if index < c["first_k_dense_replace"]:
            return self.mlp(x, layer + "mlp.", ("gate_proj", "up_proj", "down_proj"))
        name = layer + "block_sparse_moe."
        scores = sigmoid(w[name + "gate.weight"] @ x)
        biased = scores + w[name + "gate.e_score_correction_bias"]
        order = np.argsort(-biased, kind="stable")
        top = c["num_experts_per_token"]
        self.margin = min(self.margin, biased[order[top - 1]] - biased[order[top]]) if top < len(order) else self.margin
        p = scores[order[:top]]
        p = p / (p.sum() + 1e-20) if c["moe_renormalize"] else p
        p = p * c["routed_scaling_factor"]
        latent = c.get("routed_expert_hidden_size")
        z = w[name + "routed_expert_down_proj.weight"] @ x if latent else x
        y = sum(p[i] * self.mlp(z, f"{name}experts.{e}.", ("w1", "w3", "w2")) for i, e in enumerate(order[:top]))
        if latent:
            if c.get("latent_moe_use_norm"):
                y = rms_norm(y, w[name + "routed_expert_norm.weight"], c["rms_norm_eps"])
            y = w[name + "routed_expert_up_proj.weight"] @ y
        if c["num_shared_experts"]:
            y = y + self.mlp(x, name + "shared_experts.", ("gate_proj", "up_proj", "down_proj"))
        return y

    def mlp(self, x, name, parts):
        gate, up, down = (self.weights[f"{name}{part}.weight"] for part in parts)
        g, u = gate @ x, up @ x
        if self.config["hidden_act"] == "situ":
            b1, b2 = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
            return down @ (b1 * np.tanh(g / b1) * sigmoid(g) * (u if b2 is None else b2 * np.tanh(u / b2)))
        return down @ (g * sigmoid(g) * u)


def logits(config, weights, tokens, dtype=np.float64):
    """Logits [T, vocab] of a sequence, and the smallest routing margin on the way."""
    oracle = Oracle(config, weights, dtype)
    return np.stack([oracle.step(token) for token in tokens]), oracle.margin
