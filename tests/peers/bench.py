"""One training step of dspark and of speculators on the same shape, threads and machine, in turns; run by `make bench-peers`.

Both do forward, backward, clipping and the optimizer's step on one row: 5 layers, full vocabulary, vanilla Markov head, confidence. dspark's loss is
ce + tv + conf, speculators' is its default, kl + conf. A machine may be busy or throttled: the ratios are of medians of turns."""
import argparse
import json
import os
import statistics
import subprocess
import sys

SHAPES = {"small": dict(hidden=576, layers=5, heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49152, taps=5, block=7, rank=256, tokens=512, anchors=128),
          "qwen3-0.6b": dict(hidden=1024, layers=5, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab=151936, taps=5, block=7, rank=256, tokens=1024, anchors=128)}


def json_of(command):
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {run.returncode}\n{run.stderr[-2000:]}")
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dspark", required=True)
    parser.add_argument("--shapes", default="small,qwen3-0.6b")
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    a = parser.parse_args()
    here = os.path.dirname(os.path.abspath(__file__))
    print(f"{'shape':<12} {'optimizer':<9} {'':<12} {'s a step':>9} {'slots/s':>9} {'peak GiB':>9}")
    for name in a.shapes.split(","):
        shape = SHAPES[name]
        for optimizer in a.optimizers.split(","):
            ours, theirs = [], []
            for _ in range(a.turns):
                lines = json_of([a.dspark, "bench", "step", "--shape", name, "--optimizer", optimizer, "--steps", "3", "--threads", str(a.threads), "--json", "-"])
                step = next(line for line in lines if line.get("what", "").startswith("step"))
                ours.append((shape["anchors"] * shape["block"] / step["value"], step["value"], lines[-1]["peak_rss_bytes"]))
                flags = [x for k, v in shape.items() for x in ("--" + k, str(v))]
                them = json_of([sys.executable, os.path.join(here, "their_step.py"), *flags, "--optimizer", optimizer, "--steps", "2", "--threads", str(a.threads)])[-1]
                theirs.append((them["seconds"], them["slots_per_s"], them["peak_bytes"]))
            ours, theirs = ([statistics.median(column) for column in zip(*rows)] for rows in (ours, theirs))
            for who, (seconds, rate, peak) in (("dspark", ours), ("speculators", theirs)):
                print(f"{name:<12} {optimizer:<9} {who:<12} {seconds:>9.3f} {rate:>9.1f} {peak / 2**30:>9.2f}")
            print(f"{name:<12} {optimizer:<9} {'ratio':<12} {'':>9} {ours[1] / theirs[1]:>8.2f}x {ours[2] / theirs[2]:>8.2f}x", flush=True)


if __name__ == "__main__":
    main()
