#!/usr/bin/env python3
"""Registers and spills of every kernel, from what ptxas said: report.py FOLDER of *.o.log. Exit code 1 when one spills.

Tile kernels in fp32 (<float, ...>) are for checking and may: their products are calls, which save registers."""
import glob
import os
import re
import subprocess
import sys

kernels = {}  # (file, name) -> {architecture: (registers, spilled bytes, stack bytes)}
architectures = set()
for log in sorted(glob.glob(os.path.join(sys.argv[1], "*.o.log"))):
    name = arch = None
    spilled = stack = 0
    for line in open(log):
        if m := re.search(r"Compiling entry function '(\S+)' for 'sm_(\d+)'", line):
            name, arch, spilled, stack = m[1], int(m[2]), 0, 0
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spilled = int(m[1]), int(m[2]) + int(m[3])
        elif (m := re.search(r"Used (\d+) registers", line)) and name:
            architectures.add(arch)
            kernels.setdefault((os.path.basename(log)[: -len(".o.log")], name), {})[arch] = (int(m[1]), spilled, stack)
            name = None
if not kernels:
    sys.exit(f"{sys.argv[1]}: no kernel was compiled there")

plain = subprocess.run(["c++filt"], input="\n".join(n for _, n in kernels), text=True, capture_output=True, check=True).stdout.split("\n")
short = [re.sub(r"\(.*", "", re.sub(r"dspark::cuda::|\(anonymous namespace\)::|_NV_ANON_NAMESPACE::|^void ", "", p)) for p in plain]
order = sorted(architectures)
print(f"{'registers (spilled bytes)':48}" + "".join(f"{'sm_' + str(a):>12}" for a in order))
spills = 0
for ((file, _), by_arch), name in zip(kernels.items(), short):
    cells = ""
    for a in order:
        registers, spilled, stack = by_arch.get(a, (0, 0, 0))
        spills += spilled > 0 and "<float," not in name
        cells += f"{str(registers) + (f' ({spilled})' if spilled else '') + (f' +{stack}' if stack and not spilled else ''):>12}"
    print(f"{file + ': ' + name:48}{cells}")
print(f"{len(kernels)} kernels, {len(order)} architectures, {spills} with spills")
sys.exit(1 if spills else 0)
