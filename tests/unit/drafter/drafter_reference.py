"""The TTT loss restated as plainly as possible: one document at a time, every row at every step, float64.

Knows nothing of packing, row pruning, shared projections, chunks or fused gradients. Written from the
definition (hidden t, token t+k+1 → token t+k+2), not from the code under test.
"""

import torch
import torch.nn.functional as F


def norm(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rope(x, positions, theta):
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def span_ids(mask):
    """Number of the run of ones each token belongs to, or None."""
    ids, current = [], -1
    for i, value in enumerate(mask):
        if value and (i == 0 or not mask[i - 1]):
            current += 1
        ids.append(current if value else None)
    return ids


def trains(mask, t, k):
    spans = span_ids(mask)
    wanted = range(t + 1, t + k + 3)
    return wanted[-1] < len(mask) and spans[t + 1] is not None and all(spans[i] == spans[t + 1] for i in wanted)


def document_logits(w, embedding, shape, ids, aux, steps):
    """Draft logits [steps, T, W] of every row of one document; rows past the end read token 0."""
    T = len(ids)
    H, G, K, eps, E = (
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.head_dim,
        shape.rms_norm_eps,
        shape.hidden_size,
    )
    streams = [aux[:, a].double() for a in range(shape.num_aux)]
    if shape.fc_norm:
        streams = [norm(x, w[f"fc_norm.{a}.weight"], eps) for a, x in enumerate(streams)]
    hidden = torch.cat(streams, -1) @ w["fc.weight"].T
    padded = torch.cat([ids.long(), torch.zeros(steps + 1, dtype=torch.long)])
    keys, values, logits = [], [], []
    p = "midlayer."
    for k in range(steps):
        token = norm(embedding[padded[k + 1 : k + 1 + T]].double(), w[p + "input_layernorm.weight"], eps)
        x = torch.cat([token, norm(hidden, w[p + "hidden_norm.weight"], eps)], -1)
        positions = torch.arange(T) + k
        q = rope((x @ w[p + "self_attn.q_proj.weight"].T).view(T, H, K), positions, shape.rope_theta)
        key = rope((x @ w[p + "self_attn.k_proj.weight"].T).view(T, G, K), positions, shape.rope_theta)
        keys.append(key.repeat_interleave(H // G, 1))
        values.append((x @ w[p + "self_attn.v_proj.weight"].T).view(T, G, K).repeat_interleave(H // G, 1))
        rows = []
        for t in range(T):
            seen_k = torch.cat([keys[0][: t + 1], *[own[t : t + 1] for own in keys[1:]]])
            seen_v = torch.cat([values[0][: t + 1], *[own[t : t + 1] for own in values[1:]]])
            share = (torch.einsum("hk,nhk->hn", q[t], seen_k) / K**0.5).softmax(-1)
            rows.append(torch.einsum("hn,nhk->hk", share, seen_v).reshape(-1))
        hidden = hidden + torch.stack(rows) @ w[p + "self_attn.o_proj.weight"].T
        y = norm(hidden, w[p + "post_attention_layernorm.weight"], eps)
        gated = F.silu(y @ w[p + "mlp.gate_proj.weight"].T) * (y @ w[p + "mlp.up_proj.weight"].T)
        hidden = hidden + gated @ w[p + "mlp.down_proj.weight"].T
        normed = norm(hidden, w["norm.weight"], eps)
        logits.append(normed @ w["lm_head.weight"].T)
        if shape.norm_output:
            hidden = normed
        assert hidden.shape == (T, E)
    return torch.stack(logits)


def reference_loss(w, embedding, head, d2t, shape, documents, steps, decay, mask_oov=True):
    """(total, per-step losses, trained rows per step, rows left out because the argmax is out of vocab).

    documents: (ids [T], mask [T], aux [T,A,D], last [T,D]); head [V,D] of the target; w: name → float64.
    """
    draft_ids = torch.arange(len(d2t)) + d2t
    sums, counts, oov = [0.0] * steps, [0] * steps, 0
    for ids, mask, aux, last in documents:
        logits = document_logits(w, embedding, shape, ids, aux, steps)
        target = last.double() @ head.double().T
        for k in range(steps):
            for t in range(len(ids)):
                if not trains(mask.tolist(), t, k):
                    continue
                full = target[t + k + 1]
                if mask_oov and int(full.argmax()) not in draft_ids.tolist():
                    oov += 1
                    continue
                p = full[draft_ids].softmax(-1)
                sums[k] = sums[k] + (p * (p.log() - logits[k, t].log_softmax(-1))).sum()
                counts[k] += 1
    losses = [s / n if n else torch.zeros((), dtype=torch.float64) for s, n in zip(sums, counts, strict=True)]
    return sum(decay**k * loss for k, loss in enumerate(losses)), losses, counts, oov
