"""How far two correct fp32 implementations may be apart, from the very numbers they compute on.

One inner product. Of n products summed one after the other, the partial sum of i terms with random signs has rms sqrt(i) times a
term's; each addition is rounded by at most U of it, evenly distributed: rms U/sqrt(3). So the error of the whole has rms U sqrt(n/6)
times the root of the sum of the squared terms, and where terms do not cancel at most U sqrt(n)/3 times the sum itself. Two
implementations that sum in different orders: sqrt(2) of that, U sqrt(n/3) hypot(sqrt(sum x^2 w^2), y) in all for y = sum x w. (Vector
units sum in 8 or 16 lanes, whose errors are 3 to 4 times smaller; the bound is for the plainest loop.)

A chain of them. What becomes of such errors on the way to the logits is measured: the model runs 16 times with random errors of
this size on the output of every product (scores and sums of attention too), norm and rotary angle (speculators multiplies position
and frequency in fp32). That gives the standard deviation of each logit: where the errors of a slot lie along few directions, a token
whose row of the head lies along them moves many times as far as the others. 16 runs can find too little for one of millions, so it
is taken as no less than the slot's rms relative to hypot(sqrt(sum x^2 w^2), logit); the last product's own error is added.

So each logit has a standard deviation. Of 10^7 values the largest error is 5.3 of them; SIGMAS is the next whole number.

Terms. A term moves by at most sum |d term / d logit_v| times the bound of logit v, over both distributions, by its own gradient. Its
own evaluation in fp32 is a sum of VD values that do not cancel, whose error has rms U sqrt(VD)/3 (1 + |term|), so SIGMAS of that (speculators'
jsd of a nearly flat draft, whose equal terms are all rounded alike, was seen 1.1 rms off its own value in fp64; dspark's 0.04), of logits
from which the normaliser was subtracted, which rounds them by U times the largest.
"""
import contextlib
import math

import torch

import theirs  # first: it sets what speculators reads when it is imported

import speculators.models.dflash.model_definitions as definitions

U = 2.0 ** -24
SIGMAS = 6
RUNS = 16


def size(products, value):
    """hypot(sqrt(sum x^2 w^2), value) of value = sum of x W^T over `products`."""
    squares = value.square()
    for x, w in products:
        squares = squares + x.square() @ w.square().T
    return squares.sqrt()


@contextlib.contextmanager
def rounding_errors(model, longest):
    """Every result between the taps and the heads' inputs gets a random error as above."""
    c = model.config.transformer_layer_config
    heads_only = {model.lm_head, model.verifier_lm_head, getattr(getattr(model, "markov_head", None), "markov_w2", None), getattr(getattr(model, "confidence_head", None), "proj", None)}

    def product(module, given, y):
        x, w = given[0], module.weight
        return y + U * math.sqrt(w.shape[1] / 3) * size([(x, w)], y) * torch.randn_like(y)

    def attention(module, q, k, v, mask, scaling, **_):
        """As the plain one. A score's error is absolute, and the sharper the softmax the more of it reaches the output."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.mT
        squares = q.square() @ k.square().mT
        n = longest + model.block_size
        scores = scores + U * math.sqrt(c.head_dim / 3) * (squares + scores.square()).sqrt() * torch.randn_like(scores)
        p = torch.softmax(scores * scaling + (0 if mask is None else mask), -1)
        y = p @ v
        y = y + U * math.sqrt(n / 3) * (p.square() @ v.square() + y.square()).sqrt() * torch.randn_like(y)
        return y.transpose(1, 2).contiguous(), None

    def norm(module, given, y):  # the mean square of a row, then a few roundings of each value
        return y * (1 + U * math.sqrt(y.shape[-1]) / 3 * torch.randn_like(y[..., :1]) + U * math.sqrt(4 / 3) * torch.randn_like(y))

    def rotary(module, given, y):
        angle = given[1][..., None] * module.inv_freq
        error = torch.cat([U / math.sqrt(3) * angle * torch.randn_like(angle)] * 2, -1)
        return y[0] - y[1] * error, y[1] + y[0] * error

    hooks = [model.rotary_emb.register_forward_hook(rotary)]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module not in heads_only:
            hooks.append(module.register_forward_hook(product))
        if name.endswith("norm") and module is not model.verifier_norm:
            hooks.append(module.register_forward_hook(norm))
    plain, definitions.eager_attention_forward = definitions.eager_attention_forward, attention
    try:
        yield
    finally:
        definitions.eager_attention_forward = plain
        for hook in hooks:
            hook.remove()


def errors_before_heads(model, case, labels, peer):
    """What errors before the last products do to the logits of the supervised slots: the standard deviation of each [S, V], and
    that of each slot relative to the sizes of its logits [S, 1]."""
    pick, squares = case.supervised.flatten(), 0
    products = [(x[pick], w) for x, w in peer["products"]["logits"]]
    for _ in range(RUNS):
        with rounding_errors(model, max(case.lengths)):
            other, _ = theirs.run_on_some_tokens(model, case, labels)
        moved = sum((x[pick] - right) @ w.T for (x, _), (right, w) in zip(other["products"]["logits"], products))
        squares = squares + moved.square()
    squares = squares / RUNS
    relative = (squares / size(products, peer["logits"][pick]).square()).mean(1, keepdim=True).sqrt()
    return squares.sqrt(), relative


def limit(products, value, relative, deviation=0.0):
    """Bound of each value = sum of x W^T over `products`, whose x have errors that make `relative` [S, 1] of its size, or its
    `deviation` where that is known and larger."""
    n = sum(w.shape[1] for _, w in products)
    scale = size(products, value)
    return SIGMAS * ((scale * relative).square().clamp(min=torch.as_tensor(deviation).square()) + U * U * n / 3 * scale.square()).sqrt()


def term_limits(names, logits, targets, labels, d_logits, d_targets):
    """{term: bound of each slot}; d_*: bounds of each logit."""
    out, value = {}, {}
    d_logits = d_logits + U * logits.abs().amax(1, keepdim=True)
    d_targets = d_targets + U * targets.abs().amax(1, keepdim=True)
    for name in {*names, "tv"} | ({"kl_div"} if "lk_hybrid" in names else set()):
        x, y = logits.clone()[None].requires_grad_(), targets.clone()[None].requires_grad_()
        term = theirs.term(name, x, y, labels)
        term.sum().backward()
        moved = sum((v.grad[0].abs() * d).sum(1) for v, d in ((x, d_logits), (y, d_targets)) if v.grad is not None)
        value[name] = term.detach()
        out[name] = moved + SIGMAS * U * math.sqrt(logits.shape[1]) / 3 * (1 + value[name].abs())
    if "lk_hybrid" in names:  # its weight exp(-3 a) is detached: the gradient does not say how it moves with the acceptance
        out["lk_hybrid"] += 3 * (value["kl_div"] - value["tv"]).abs() * out["tv"]
    return out


def confidence_limits(confidence, d_confidence, d_tv):
    """BCE(c, 1 - tv) moves by at most |sigmoid(c) - (1 - tv)| <= 1 with c, by |c| with tv; a few roundings of its own."""
    return d_confidence + confidence.abs() * d_tv + 4 * U * (1 + confidence.abs())


def d_pace_limits(supervised, weight, ce, d_ce):
    """How far D-PACE weights of alpha 1/2 may move: s = (exp(-ce) + 1)/2 moves by at most exp(-ce) d_ce of itself, and a weight is a
    sum of products of its block's s."""
    moved = torch.zeros(supervised.shape, dtype=torch.float64)
    moved[supervised] = ((-ce).exp() * d_ce).double()
    return weight * moved.sum(1, keepdim=True).expand(supervised.shape)[supervised]
