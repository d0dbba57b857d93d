#!/usr/bin/env python3
"""`make test-peers`: drafters packed by dspark load in the real speculators and give the same logits and the same loss there.

Extracts a few rows, trains small drafters for two steps each, packs them with and without the target's embeddings, and compares
dspark's forward and loss head in fp32 (tests/test_peers.cc) with speculators' own in fp32, on the same states, tokens and anchors.
What does not hold is a line that begins with FAILED, and exit code 1. TensorBoard reads a run's event files beside (events.py).
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time

import theirs  # first: it sets what the libraries read from the environment when they are imported

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import bounds
import events
import inputs
from target import target_folder

TAPS = [2, 9, 16, 23, 28]
TRAIN = ["--steps", "2", "--batch-docs", "3", "--val-fraction", "0", "--anchors", "16", "--lr", "0.003", "--warmup", "0"]
# What is trained, and by which rules its slots and loss are then compared.
DRAFTERS = {
    "pruned": ("--layers 3 --draft-vocab 8192", ["deepspec", "speculators"]),
    # speculators' trainer counts the window from the anchor; `served`, dspark's default, is what vLLM and llama.cpp do.
    "sliding": ("--layers 2 --rank 64 --layer-types sliding --window 20 --window-rule anchor", ["deepspec", "speculators"]),
    "dflash": ("--layers 2 --markov none", ["deepspec", "D-PACE"]),
    # The layout of speculators' own DFlash, under a Markov head; nothing in it is a copy of the target's.
    "bonus": ("--layers 2 --rank 64 --draft-vocab 4096 --layout bonus --block 8 --warm-start none", ["deepspec", "speculators"]),
    "gated": ("--layers 1 --rank 64 --draft-vocab 4096 --markov gated --warm-start none", ["speculators"]),
    "rnn": ("--layers 1 --rank 64 --draft-vocab 4096 --markov rnn --warm-start none", ["deepspec"]),
}
# Every term, with coefficients unlike each other, so that a swapped pair shows in the total.
EVERY_TERM = {"loss": {"ce": 0.3, "tv": 1.1, "kl_div": 0.7, "rkl": 0.5, "jsd": 1.9, "nla": 0.2, "lk_hybrid": 0.9}, "confidence_alpha": 1.3, "gamma": 4.0}
D_PACE = {"loss": {"ce": 1.0}, "confidence_alpha": 1.3, "gamma": 4.0, "position_weight": "dpace", "dpace_alpha": 0.5}
OBJECTIVES = {"deepspec": ("deepspec", EVERY_TERM), "speculators": ("speculators", EVERY_TERM), "D-PACE": ("speculators", D_PACE)}
TOP = {"logits": "draft_top", "targets": "target_top"}
failures = []


def check(holds, text):
    print(("  " if holds else "FAILED ") + text, flush=True)
    if not holds:
        failures.append(text)


def call(*command, **environment):
    ran = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ran.returncode != 0:
        sys.exit(f"{ran.stdout[-4000:]}\nFAILED {' '.join(command)}: exit code {ran.returncode}")
    return ran.stdout


class Bench:
    def __init__(self, a):
        self.a = a
        shutil.rmtree(a.out, ignore_errors=True)
        self.hf = target_folder(a.target, a.cache)
        self.store = self.at("store")
        rows = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rows.jsonl")
        call(a.dspark, "extract", "--target", a.target, "--data", rows, "--taps", ",".join(map(str, TAPS)), "--precision", "fp32", "--codec", "raw", "--out", self.store)

    def at(self, *names):
        return os.path.join(self.a.out, *names)

    def hidden_test(self, tag, folder, description):
        """One of the hidden tests of dspark_tests on a folder."""
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "case.json"), "w") as f:
            json.dump(description, f)
        call(self.a.tests, f"[{tag}]", DSPARK_PEERS=os.path.abspath(folder))
        return load_file(os.path.join(folder, "out.safetensors"))

    def make_drafter(self, name, flags):
        run, target = self.at(name, "run"), ["--target", self.a.target]
        call(self.a.dspark, "train", "--store", self.store, *target, "--out", run, *TRAIN, *flags.split())
        shutil.rmtree(os.path.join(run, "checkpoints"))
        call(self.a.dspark, "pack", run, "--to", "speculators", "--out", self.at(name, "packed"))
        call(self.a.dspark, "pack", run, "--to", "speculators", "--out", self.at(name, "whole"), *target)

    def inspect(self, folder):
        return json.loads(call(self.a.dspark, "pack", folder, "--inspect", "--json", "-"))


@torch.no_grad()
def check_taps(bench, store):
    """State n of the store is Hugging Face's hidden_states[n], which is what speculators' layer id n means."""
    model = AutoModelForCausalLM.from_pretrained(bench.hf, dtype=torch.float32)
    last = []
    model.model.norm.register_forward_pre_hook(lambda module, given: last.append(given[0][0]))
    tokens = store["tokens"][:int(store["lengths"][0])].long()
    hidden = torch.stack(model.model(tokens[None], output_hidden_states=True).hidden_states)[:, 0]
    hidden[-1] = last[0]  # hidden_states ends with the normalised one
    numbers = store["taps"].tolist() + [len(hidden) - 1]
    for part, n in enumerate(numbers):
        mine = store["states"][:len(tokens), part].float()
        error = (hidden - mine).flatten(1).norm(dim=1) / mine.norm()
        # Rounding to bf16 moves a value by at most 2^-8 of itself.
        if int(error.argmin()) != n or not float(error[n]) < 2 ** -8:
            check(False, f"part {part} of the store is not the state after {n} layers (off by {float(error[n]):.2g}); nearest is {int(error.argmin())}")
    check(numbers[:-1] == TAPS, f"store: taps {numbers[:-1]} and the last state are transformers' hidden states of these numbers")


def check_loading(bench, name):
    """Loads both packed folders; returns the model of the one without embeddings, whose frozen tensors are the target's own."""
    taken = {}
    for kind in ("whole", "packed"):
        folder = bench.at(name, kind)
        model, stored, problems = theirs.load(folder, bench.hf)
        for problem in problems:
            check(False, f"{kind}: {problem}")
        if model is None:
            return None
        own = bench.inspect(folder)
        facts = {"taps_after_layers": model.target_layer_ids, "block": model.block_size, "mask_token": model.mask_token_id, "draft_vocabulary": model.draft_vocab_size,
                 "layout": "anchor" if model.config.sample_from_anchor else "bonus", "rank": getattr(model.config, "markov_rank", 0),
                 "proposals": model.config.speculators_config.proposal_methods[0].speculative_tokens, "algorithm": model.config.speculators_model_type}
        for key, value in facts.items():
            if own[key] != value:
                check(False, f"{kind}: {key} is {own[key]} to dspark and {value} to speculators")
        check(not problems, f"{type(model).__name__} {'with' if kind == 'whole' else 'without'} the target's tensors: {len(stored)} tensors, none missing, unexpected, of another shape or value")
        taken[kind] = set(stored)
    shared = {"embed_tokens.weight"} | (set() if model.use_draft_vocab else {"lm_head.weight"})
    check(taken["whole"] - taken["packed"] == shared, f"the embeddings make the difference: {', '.join(sorted(shared))}")

    # And back: what speculators saves of it is the same drafter to dspark.
    saved, again = bench.at(name, "saved"), bench.at(name, "again")
    copy, _, _ = theirs.load(bench.at(name, "packed"), bench.hf)
    copy.to(torch.bfloat16).save_pretrained(saved)
    call(bench.a.dspark, "pack", saved, "--to", "speculators", "--out", again)
    before, after = load_file(bench.at(name, "packed", "model.safetensors")), load_file(os.path.join(again, "model.safetensors"))
    facts = [{k: v for k, v in bench.inspect(f).items() if k != "target"} for f in (bench.at(name, "packed"), again)]
    check(before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before) and facts[0] == facts[1],
          "saved by speculators and packed again: the same tensors, bit for bit, and the same facts")
    return model


def worst(got, want, bound):
    """Largest error over its bound; infinite where something is not finite."""
    ratio = (got.double() - want.double()).abs() / bound.double()
    return float(ratio.max()) if torch.isfinite(ratio).all() else float("inf")


def bounds_of(model, case, labels, peer):
    """Bounds of the values of each kind, for the supervised slots."""
    pick = case.supervised.flatten()
    deviation, relative = bounds.errors_before_heads(model, case, labels, peer)
    before = {"logits": (relative, deviation), "targets": (0.0,), "confidence": (relative,)}
    return {kind: bounds.limit([(x[pick], w) for x, w in products], peer[kind].reshape(len(pick), -1)[pick], *before[kind])
            for kind, products in peer["products"].items()}


def check_numbers(bench, name, store, model, what):
    rules, objective = OBJECTIVES[what]
    case = inputs.Case(store, model, rules)
    folder = bench.at(name, what)
    os.makedirs(folder)
    save_file(case.fixture(), os.path.join(folder, "in.safetensors"))
    has_confidence = getattr(model, "confidence_head", None) is not None
    mine = bench.hidden_test("peers-drafter", folder, {"case": name, "drafter": os.path.abspath(bench.at(name, "packed")), "target": os.path.abspath(bench.a.target),
                                                       "config": objective | {"confidence": has_confidence}, "rules": inputs.RULES[rules]})
    pick = case.supervised.flatten()
    slots = pick.nonzero()[:, 0]
    labels = case.labels.clone()
    if rules == "speculators":  # the target's first arg-max; that it is theirs too is checked below
        labels.view(-1)[mine["slot"]] = mine["target_top"].long()
    label = labels.flatten()[pick]
    same = torch.equal(mine["slot"], slots) and (rules == "speculators" or torch.equal(mine["label"].long(), label))
    check(same, f"rules and loss of {what}: {len(case.anchors)} anchors, {len(slots)} supervised slots ({int((label < 0).sum())} with a label that is not kept): the same slots and labels")
    if not same:
        return None
    peer = theirs.run(model, case, labels, objective)
    check(torch.equal(peer["mask"].flatten() != 0, pick), "  the mask speculators' loss takes is the same")

    said = []
    def compare(of, got, want, bound):
        ratio = worst(got, want, bound)
        said.append(f"{of} {ratio:.2f}")
        if not ratio <= 1:
            check(False, f"{of}: {ratio:.3g} times the bound")
    limits = bounds_of(model, case, labels, peer)
    for kind, bound in limits.items():
        value = peer[kind].reshape(len(pick), -1)[pick]
        compare(kind, mine[kind].reshape(value.shape), value, bound)
        if kind in TOP:
            top = value.topk(2, dim=1)
            decided = top.values[:, 0] - top.values[:, 1] > 2 * bound.amax(1)
            if not bool(((mine[TOP[kind]].long() == top.indices[:, 0]) | ~decided).all()):
                check(False, f"another arg-max of the {kind}")
    differ = lambda kind: float((mine[kind] - peer[kind][pick]).abs().max())
    spread = lambda kind: float(peer[kind][pick].std(1).mean())
    print(f"    {list(mine['logits'].shape)} logits of the drafter differ by at most {differ('logits'):.2g} (rows spread by {spread('logits'):.2g}), of the target by {differ('targets'):.2g} ({spread('targets'):.2g})")

    terms = bounds.term_limits(objective["loss"], peer["logits"][pick], peer["targets"][pick], label, limits["logits"], limits["targets"])
    accept = 1 - theirs.term("tv", peer["logits"][None, pick], peer["targets"][None, pick], label)
    compare("acceptance", mine["accept"], accept, terms["tv"])
    names = list(objective["loss"])
    if has_confidence:
        terms["conf"] = bounds.confidence_limits(peer["confidence"][pick], limits["confidence"][:, 0], terms["tv"])
        names.append("conf")
    for term in names:
        compare(term, mine[term], peer["terms"][term][pick], terms[term])
    check(True, "  every value and term of every slot, largest error over its bound: " + ", ".join(said))

    # The totals, as functions of the terms just compared: by as much as those differ, and the rounding of their sums in fp32.
    coefficients = objective["loss"] | {"conf": objective["confidence_alpha"]}
    sums = bounds.U * (len(pick) ** 0.5 / 3 + 4)
    bound = 0.0
    for term in names:
        weight = coefficients[term] * mine["conf_weight" if term == "conf" else "weight"]
        value = peer["terms"][term][pick].double()
        difference = (mine[term] - value).abs()
        if "dpace_alpha" in objective and term == "ce":
            bound += float((bounds.d_pace_limits(case.supervised, weight, value, difference) * value).sum())
        bound += float((weight * (difference + sums * value.abs())).sum())
    bound /= len(slots)
    got, want = float(mine["loss"]), peer["loss"]
    check(abs(got - want) <= bound, f"  loss {got:.7f}, speculators {want:.7f}, bound {bound:.2g}")
    if "accept_len_sum" in peer["metrics"]:
        # A product of acceptances <= 1 moves by at most the sum of their differences; a block has B of them.
        tau = float(peer["metrics"]["accept_len_sum"] / peer["metrics"]["accept_len_total"])
        bound = model.block_size * (float((mine["accept"] - accept).abs().sum()) / int(case.supervised.any(1).sum()) + sums * tau)
        check(abs(float(mine["tau"]) - tau) <= bound, f"  expected accepted length {float(mine['tau']):.7f}, speculators {tau:.7f}, bound {bound:.2g}")
    return case, labels, peer, limits["logits"]


def check_mistakes(model, case, labels, right, bound):
    """Would the comparison notice? Their side with a small mistake against their side without."""
    pick = case.supervised.flatten()
    for mistake, change in inputs.mistakes(model, case):
        with change:
            wrong, some = theirs.run_on_some_tokens(model, case, labels)
        ratio = worst(wrong["logits"][pick], right["logits"][pick][:, some], bound[:, some])
        check(ratio > 10, f"were it that {mistake}, logits would differ by {ratio:.2g} times the bound")


def main():
    parser = argparse.ArgumentParser()
    for name in ("dspark", "tests", "target", "cache", "out"):
        parser.add_argument("--" + name, required=True)
    began = time.time()
    torch.manual_seed(0)  # of the errors in bounds.py
    bench = Bench(parser.parse_args())
    store = bench.hidden_test("peers-store", bench.at("dump"), {"store": os.path.abspath(bench.store)})
    check_taps(bench, store)
    for name, (flags, objectives) in DRAFTERS.items():
        print(f"{name}: dspark train {flags}", flush=True)
        bench.make_drafter(name, flags)
        model = check_loading(bench, name)
        if model is None:
            continue
        for objective in objectives:
            compared = check_numbers(bench, name, store, model, objective)
        if compared is not None:
            check_mistakes(model, *compared)
    print("events: dspark train --tensorboard", flush=True)
    events.check_events(bench.a.dspark, bench.a.target, bench.store, bench.at("events"), call, check)
    for text in failures:
        print("FAILED " + text, file=sys.stderr)
    print(f"test-peers: {len(failures)} failed; {len(DRAFTERS)} drafters against speculators {theirs.VERSION} in {time.time() - began:.0f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
