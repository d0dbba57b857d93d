"""A drafter in speculators: loaded with every tensor accounted for, and its own forward and loss on given inputs."""
import contextlib
import importlib.metadata
import os

# No GPU (it would compile its forward), and nothing is to be looked up on the network.
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

import torch
from loguru import logger
from safetensors.torch import load_file
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
logger.disable("speculators")

import speculators.models  # registers the algorithms
import speculators.models.dflash.core as dflash_core
import speculators.models.dspark.core as dspark_core
from speculators.config import SpeculatorModelConfig
from speculators.losses import eager
from speculators.model import SpeculatorModel

VERSION = importlib.metadata.version("speculators")
dflash_core.logger.setLevel("ERROR")  # "DFlash with sample_from_anchor=True may not be supported in all inference engines"
FUNCTIONS = {"ce": eager.ce_loss, "tv": eager.tv_loss, "kl_div": eager.kl_div_loss, "rkl": eager.reverse_kl_div_loss, "jsd": eager.js_div_loss,
             "nla": eager.neg_log_acceptance_loss, "lk_hybrid": eager.lk_hybrid_loss}


def load(folder, target):
    """(model, names of the stored tensors, problems): as a user loads it, but for fp32, the plain attention and where the target
    lies. `from_pretrained` only warns of most of what is called a problem here; where it throws, there is no model."""
    try:
        config = SpeculatorModelConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "eager"
        config.speculators_config.verifier.name_or_path = target
        _, info = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32, output_loading_info=True)
        model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32)
    except Exception as error:
        return None, set(), [f"speculators refuses {folder}: {type(error).__name__}: {error}"]
    problems = [f"speculators reports {kind}: {sorted(map(str, found))}" for kind, found in info.items() if found]
    if model._attn_impl != "eager":
        problems.append(f"attention is {model._attn_impl}, not the plain one asked for")

    stored, wanted = load_file(os.path.join(folder, "model.safetensors")), model.state_dict()
    # What speculators takes from the target at every load, whatever the file holds.
    of_target = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"} | (set() if model.use_draft_vocab else {"lm_head.weight"})
    for name in sorted(wanted.keys() - stored.keys() - of_target):
        problems.append(f"tensor {name} {list(wanted[name].shape)} is missing")
    for name in sorted(stored.keys() - wanted.keys()):
        problems.append(f"tensor {name} is not one of the model's")
    for name in sorted(stored.keys() & wanted.keys()):
        have, want = stored[name], wanted[name]
        if have.shape != want.shape:
            problems.append(f"tensor {name} is {list(have.shape)}, not {list(want.shape)}")
        # A copy of a target's tensor is its bf16 rounding; everything else must be in use as stored.
        elif not torch.equal(have, want.to(have.dtype)) or (name not in of_target and not torch.equal(have.to(want.dtype), want)):
            problems.append(f"tensor {name} has other values once loaded")
    if model.use_draft_vocab:
        if not torch.equal(torch.arange(model.draft_vocab_size) + model.d2t, model.t2d.nonzero()[:, 0]):
            problems.append("d2t and t2d name different tokens")
        if not torch.equal(stored["lm_head.weight"], model.verifier_lm_head.weight.to(torch.bfloat16)):
            problems.append("the rows of lm_head are not the target's rows that t2d keeps")
    for name, value in wanted.items():
        if value.is_floating_point() and not value.isfinite().all():
            problems.append(f"tensor {name} is not finite once loaded")
    return model.eval(), set(stored), problems


def term(name, logits, targets, labels):
    """One term of every slot [S] by their function, from [1, S, VD]. Their `ce` labels a slot with the arg-max of the target logits
    it is given: it is given `labels` [S] there; -1 (not kept) has no term (DESIGN 14)."""
    if name != "ce":
        return FUNCTIONS[name](logits, targets)[0]
    one_hot = torch.zeros_like(logits, requires_grad=False).scatter_(2, labels.clamp(min=0).reshape(1, -1, 1), 1.0)
    return (eager.ce_loss(logits, one_hot) * (labels >= 0))[0]


@torch.no_grad()
def run(model, case, labels, objective):
    """Their `forward` on the row, with our anchors in place of those it would draw and, by DeepSpec's rules, our supervised slots in
    place of its own. All slots [A*B]: logits, target logits and confidence with what they are products of, the terms, the mask; and
    its loss and metrics."""
    seen, given = {}, {}
    labels, weights = labels.reshape(-1), objective["loss"]
    dspark = isinstance(model, dspark_core.DSparkDraftModel)
    kinds = ("logits", "targets", "confidence") if dspark else ("logits", "targets")

    def recorded(compute):
        def wrapped(*tensors, **options):
            tensors = list(tensors)
            if case.rules == "deepspec":
                tensors[len(kinds)] = case.supervised.reshape(1, -1).float()
            seen.update(zip((*kinds, "mask"), tensors))
            return compute(*tensors, **options)
        return wrapped

    products = {"lm_head": "logits", "verifier_lm_head": "targets"} | ({"markov_head.markov_w2": "logits", "confidence_head.proj": "confidence"} if dspark else {})
    hooks = [model.get_submodule(name).register_forward_hook(lambda module, x, _, name=name: given.setdefault(name, []).append(x[0])) for name in products]
    saved = dflash_core.select_anchors, dflash_core.compute_metrics, dspark_core.compute_metrics
    dflash_core.select_anchors = lambda loss_mask, n, block: (case.anchors, torch.ones(n, dtype=torch.bool))
    dflash_core.compute_metrics, dspark_core.compute_metrics = recorded(saved[1]), recorded(saved[2])
    options = {"loss_config": {name: (lambda x, y, name=name: term(name, x, y, labels)[None], weight) for name, weight in weights.items()}, "gamma": objective["gamma"], "max_anchors": len(case.anchors)}
    if "dpace_alpha" in objective:
        options |= {"per_position_loss_weight": "dpace", "dpace_alpha": objective["dpace_alpha"]}
    if dspark:
        options |= {"tv_loss_fn": eager.tv_loss, "confidence_head_alpha": objective["confidence_alpha"]}
    try:
        _, loss, metrics = model(**case.row, **options)
    finally:
        dflash_core.select_anchors, dflash_core.compute_metrics, dspark_core.compute_metrics = saved
        for hook in hooks:
            hook.remove()

    out = {kind: value[0] for kind, value in seen.items()}
    out["terms"] = {name: term(name, seen["logits"], seen["targets"], labels) for name in weights}
    if dspark:
        accept = 1 - term("tv", seen["logits"], seen["targets"], labels)
        out["terms"]["conf"] = torch.nn.functional.binary_cross_entropy_with_logits(out["confidence"], accept, reduction="none")
    out["products"] = {kind: [] for kind in kinds}
    for name, x in given.items():  # an rnn head comes slot by slot
        rows = (x[0] if len(x) == 1 else torch.stack(x, 1)).flatten(0, -2)
        if len(rows) != labels.numel():  # the target's head goes over the whole row where that is less: the rows of the slots
            rows = rows[(case.anchors[:, None] + torch.arange(case.block) - (0 if case.from_anchor else 1)).flatten() % len(rows)]
        out["products"][products[name]].append((rows, model.get_submodule(name).weight.detach()))
    return out | {"loss": float(loss), "metrics": metrics}


def run_on_some_tokens(model, case, labels):
    """(`run`, ids): with 1024 tokens of the draft vocabulary, always the same, which saves most of a run."""
    ids = torch.randperm(model.draft_vocab_size, generator=torch.Generator().manual_seed(1))[:1024]
    heads = [model.lm_head, model.verifier_lm_head] + ([model.markov_head.markov_w2] if getattr(model, "markov_head", None) is not None else [])
    whole = [head.weight for head in heads]
    with contextlib.ExitStack() as stack:
        for head, weight in zip(heads, whole):
            head.weight = torch.nn.Parameter(weight.detach()[ids], requires_grad=False)
            stack.callback(setattr, head, "weight", weight)
        return run(model, case, labels, {"loss": {"tv": 1.0}, "confidence_alpha": 1.0, "gamma": 1.0}), ids
