"""The TTT loss restated as plainly as possible: one document at a time, every row at every step, float64.

Knows nothing of packing, row pruning, shared projections, chunks or fused gradients. Written from the
definition (hidden t, token t+k+1 → token t+k+2), not from the code under test. ``numeric_gradients`` holds
its gradients, and those of anything else, against differences of values.
"""

import math

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
        read = norm(hidden, w[p + "hidden_norm.weight"], eps)
        x = torch.cat([token, read], -1)
        if shape.norm_before_residual:
            hidden = read
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


LK_DECAY = 3.0


def row_loss(target, logits, kind="kl", top_k=0, weight=None):
    """(loss of one row, weight of its KL part) from the target's and the draft's logits over the draft vocab.

    kl  sum p log(p / q), the target reduced to its ``top_k`` largest logits (all that equal the last one too)
    ce  -log q at the target's first largest logit
    lk  w KL + (1 - w) (1 - sum min(p, q)), w = exp(-3 sum min(p, q)) a constant; ``weight`` gives w instead
    """
    log_q = logits.log_softmax(-1)
    if kind == "ce":
        return -log_q[int(target.argmax())], None
    smallest = target.sort(descending=True).values[min(top_k or len(target), len(target)) - 1]
    stays = [i for i in range(len(target)) if target[i] >= smallest]
    log_p, log_q_there = target[stays].log_softmax(-1), log_q[stays]
    kl = (log_p.exp() * (log_p - log_q_there)).sum()
    if kind == "kl":
        return kl, None
    accepted = torch.minimum(log_p.exp(), log_q_there.exp()).sum()
    weight = math.exp(-LK_DECAY * float(accepted.detach())) if weight is None else weight
    return weight * kl + (1 - weight) * (1 - accepted), weight


def reference_loss(
    w,
    embedding,
    head,
    d2t,
    shape,
    documents,
    steps,
    decay,
    mask_oov=True,
    kind="kl",
    top_k=0,
    anchors=None,
    lk_weights=None,
):
    """(total, per-step losses, trained rows per step, rows left out because the argmax is out of vocab).

    documents: (ids [T], mask [T], aux [T,A,D], last [T,D]); head [V,D] of the target; w: name → float64.
    anchors: per document the rows that may train; None is every row.
    lk_weights: (document, row, step) → weight of the KL part, filled when it is not there.
    """
    draft_ids = torch.arange(len(d2t)) + d2t
    sums, counts, oov = [0.0] * steps, [0] * steps, 0
    lk_weights = {} if lk_weights is None else lk_weights
    for number, (ids, mask, aux, last) in enumerate(documents):
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
                if anchors is not None and t not in anchors[number]:
                    continue
                place = (number, t, k)
                value, weight = row_loss(full[draft_ids], logits[k, t], kind, top_k, lk_weights.get(place))
                lk_weights.setdefault(place, weight)
                sums[k] = sums[k] + value
                counts[k] += 1
    losses = [s / n if n else torch.zeros((), dtype=torch.float64) for s, n in zip(sums, counts, strict=True)]
    return sum(decay**k * loss for k, loss in enumerate(losses)), losses, counts, oov


def numeric_gradients(value, tensors, seed=0, size=1e-4):
    """name → (a random direction of length 1, derivative of ``value()`` along it) by differences of fourth order.

    value: a float from the tensors as they are now; tensors: name → float64 tensor, put back afterwards.
    """
    generator = torch.Generator().manual_seed(seed)
    slopes = {}
    for name, tensor in tensors.items():
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        there = tensor.detach().clone()
        values = []
        with torch.no_grad():
            for step in (-2, -1, 1, 2):
                tensor.copy_(there + step * size * direction)
                values.append(float(value()))
            tensor.copy_(there)
        slopes[name] = direction, (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * size)
    return slopes
