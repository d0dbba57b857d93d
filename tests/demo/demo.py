#!/usr/bin/env python3
"""The demo: a drafter for SmolLM2-135M-Instruct from nothing but the model, in about ten minutes.

Lets the model write conversations, extracts its hidden states, trains a DSpark drafter and a DFlash one on the same data and
steps, decodes held-out questions with both, packs the first, and prints one table (also build/demo/result.json).
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time

# What a quiet 2-core machine with AVX-512 BF16 does in about eleven minutes; slower ones get less, said on the console.
CONVERSATIONS, HELD_OUT, STEPS = 340, 52, 380
REFERENCE_SECONDS = 6.6  # of the measurement below on that machine


class Demo:
    def __init__(self, dspark, target, out):
        self.dspark, self.target, self.out = dspark, target, out
        self.stages = []

    def run(self, name, *arguments):
        """One stage: a dspark command with --json; returns the JSON lines it wrote."""
        result = os.path.join(self.out, name + ".json")
        command = [self.dspark, *arguments, "--json", result]
        print(f"\n== {name}: dspark {' '.join(arguments)}", flush=True)
        start = time.time()
        subprocess.run(command, check=True)
        seconds = time.time() - start
        with open(result) as f:
            lines = [json.loads(line) for line in f]
        self.stages.append({"name": name, "seconds": round(seconds, 2), "peak_rss_bytes": lines[-1].get("peak_rss_bytes", 0)})
        return lines


def folder_bytes(path):
    return sum(os.path.getsize(os.path.join(base, f)) for base, _, files in os.walk(path) for f in files)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dspark", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    shutil.rmtree(a.out, ignore_errors=True)
    os.makedirs(a.out)
    at = lambda name: os.path.join(a.out, name)
    demo = Demo(a.dspark, a.target, a.out)
    began = time.time()

    # A short measurement sizes the rest.
    start = time.time()
    demo.run("measure", "extract", "--target", a.target, "--synthesize", "8", "--max-new-tokens", "64", "--out", at("measure"))
    speed = REFERENCE_SECONDS / (time.time() - start)
    # Without bf16 instructions it may take twenty minutes instead of twelve.
    kernels = subprocess.run([a.dspark, "--version"], check=True, capture_output=True, text=True).stdout
    patience = 1.0 if "avx512bf16" in kernels or "amx" in kernels else 1.6
    share = min(1.0, max(0.25, speed * patience))
    conversations, steps, held_out = int(CONVERSATIONS * share), int(STEPS * share), int(HELD_OUT * (0.5 + 0.5 * share))
    print(f"\nthis machine: {speed:.2f} of the reference speed -> {conversations} conversations, {steps} steps, {held_out} held-out questions")

    extract = demo.run("extract", "extract", "--target", a.target, "--synthesize", str(conversations), "--max-new-tokens", "128",
                       "--hold-out", str(held_out), "--hold-out-file", at("held_out.jsonl"), "--out", at("store"))[-1]
    # Many small steps learn most in this time: 8 documents with 12 blocks of 5 each, a high learning rate, and the target's whole
    # distribution (kl) beside the acceptance itself (tv).
    common = ["--store", at("store"), "--target", a.target, "--steps", str(steps), "--batch-docs", "8", "--layers", "5", "--block", "5",
              "--draft-vocab", "8192", "--anchors", "12", "--lr", "2e-3", "--loss", "kl=0.5,tv=1.8,conf=0.1"]
    demo.run("train_dspark", "train", *common, "--out", at("dspark"))
    demo.run("train_dflash", "train", *common, "--markov", "none", "--out", at("dflash"))
    result = demo.run("eval", "eval", "--target", a.target, "--drafter", at("dspark"), at("dflash"), "--data", at("held_out.jsonl"),
                      "--temperature", "1", "--max-new-tokens", "96")[-1]
    demo.run("pack", "pack", at("dspark"), "--to", "speculators", "--target", a.target, "--out", at("packed"))

    first, second = result["total"], result["compared"][0]["total"]
    difference = result["compared"][0]["paired_difference"]
    pick = lambda t: {k: t[k] for k in ("accepted_length", "ci95", "prefix_acceptance")}
    table = {
        "stages": demo.stages, "seconds": round(time.time() - began, 1), "machine_share": share,
        "dspark": pick(first), "dflash": pick(second), "paired_difference": difference,
        "tokens_per_s": first["tokens_per_s"], "tokens_per_s_without": first["tokens_per_s_without"],
        "speedup": first["speedup"], "break_even_length": first["break_even_length"],
        "drafter": {"path": at("packed"), "bytes": folder_bytes(at("packed"))},
        "store": {"path": at("store"), "bytes": extract["bytes"], "samples": extract["samples"], "tokens": extract["tokens"], "ratio": extract["ratio"]},
    }
    with open(at("result.json"), "w") as f:
        json.dump(table, f, indent=1)

    print("\n" + "=" * 78)
    print(f"{'stage':<16}{'seconds':>10}{'peak memory':>16}")
    for s in demo.stages:
        print(f"{s['name']:<16}{s['seconds']:>10.1f}{s['peak_rss_bytes'] / 2**20:>12.0f} MiB")
    print(f"{'total':<16}{table['seconds']:>10.1f}\n")
    for name in ("dspark", "dflash"):
        t = table[name]
        rates = " ".join(f"{p:.3f}" for p in t["prefix_acceptance"])
        print(f"{name}: accepted length {t['accepted_length']:.3f} [{t['ci95'][0]:.3f}, {t['ci95'][1]:.3f}] at temperature 1; by position {rates}")
    print(f"difference, paired by prompt: {difference['mean']:+.3f} [{difference['ci95'][0]:+.3f}, {difference['ci95'][1]:+.3f}]")
    print(f"tokens/s: {table['tokens_per_s']:.1f} with, {table['tokens_per_s_without']:.1f} without drafting ({table['speedup']:.2f}x); "
          f"drafting pays on this CPU above an accepted length of {table['break_even_length']:.2f}")
    print(f"store: {table['store']['samples']} conversations, {table['store']['tokens']} tokens, {table['store']['bytes'] / 2**20:.1f} MiB (zstd ratio {table['store']['ratio']:.2f})")
    print(f"drafter: {table['drafter']['bytes'] / 2**20:.1f} MiB in {table['drafter']['path']}")
    print(f"all of it: {at('result.json')}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as e:
        sys.exit(e.returncode)
