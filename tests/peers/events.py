"""TensorBoard reads from the event files of a run that was killed and resumed what `--json` says of it, every scalar of every step."""
import json
import os
import shutil
import signal
import subprocess
import time

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS, SAVE_EVERY, KILLED_AFTER = 7, 3, 5
RUN = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--validate-every", "2", "--batch-docs", "2", "--val-fraction", "0.3",
       "--anchors", "8", "--layers", "1", "--rank", "32", "--draft-vocab", "4096", "--loss", "ce=0.1,tv=1.8,kl=0.2,conf=1"]
# Where a scalar of the JSON is found.
TAGS = {"loss": "loss/total", "ce": "loss/ce", "tv": "loss/tv", "kl": "loss/kl", "conf": "loss/conf", "tau": "acceptance/tau", "confidence_bias": "confidence/bias",
        "confidence_abs_error": "confidence/abs_error", "grad_norm": "optimizer/grad_norm", "lr": "optimizer/lr", "tokens_per_s": "speed/tokens_per_s",
        "slots_per_s": "speed/slots_per_s", "mfu": "speed/mfu"}
NO_SCALAR = {"phase", "step", "applied", "calibration", "blocks"}


def records(path):
    """Whole lines of a --json file that begin a step or a validation."""
    with open(path) as f:
        lines = [json.loads(line) for line in f if line.endswith("\n")]
    return [r for r in lines if r["phase"] in ("train", "validation")]


def scalars(record):
    for key, value in record.items():
        if key in ("accept_rate", "top1"):
            for k, v in enumerate(value):
                yield f"{'acceptance' if key == 'accept_rate' else 'top1'}/position_{k + 1}", v
        elif key == "ms":
            for k, v in value.items():
                yield f"time/{k}_ms", v
        elif key not in NO_SCALAR:
            yield TAGS[key], value


def kill_after(command, path, step):
    """Runs a training and kills it -9 when its JSON has come to this step."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 300
    while process.poll() is None and time.time() < deadline:
        if os.path.exists(path) and any(r["step"] >= step and r["phase"] == "train" for r in records(path)):
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def check_events(dspark, target, store, folder, call, check):
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    at = lambda name: os.path.join(folder, name)
    command = [dspark, "train", "--store", store, "--target", target, "--out", at("run"), "--tensorboard", at("events"), *RUN]
    killed = kill_after([*command, "--json", at("first.json")], at("first.json"), KILLED_AFTER)
    check(killed, f"a run was killed after step {KILLED_AFTER} of {STEPS}")
    call(*command, "--json", at("rest.json"))
    rest = records(at("rest.json"))
    resumed = rest[0]["step"] - 1
    first = records(at("first.json"))
    check(resumed >= SAVE_EVERY and max(r["step"] for r in first) > resumed, f"it went on after step {resumed}; its first part had done more")

    expected = {}
    for r in [r for r in first if r["step"] <= resumed] + rest:
        for tag, value in scalars(r):
            tag = tag if r["phase"] == "train" else "validation/" + tag
            expected.setdefault(tag, []).append((r["step"], float("nan") if value is None else float(np.float32(value))))
    reader = EventAccumulator(at("events"), size_guidance={"scalars": 0})
    reader.Reload()
    got = {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    for tag in sorted(expected.keys() | got.keys()):
        if expected.get(tag) != got.get(tag):
            check(False, f"{tag}: TensorBoard reads {got.get(tag)}, --json says {expected.get(tag)}")
    check(got == expected, f"TensorBoard reads the same {sum(map(len, got.values()))} values under {len(got)} tags from {len(os.listdir(at('events')))} event files as --json wrote")
