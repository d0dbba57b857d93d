#!/usr/bin/env bash
# Prints the folder of a CUDA 13 toolkit that can compile: $CUDA_HOME, /usr/local/cuda or nvcc's own where they are there, else one
# put together from NVIDIA's PyPI packages (compiler, runtime, headers; 130 MB) in the cache folder. --fetch: only the latter.
set -euo pipefail
is_13() { [ -x "$1/bin/nvcc" ] && "$1/bin/nvcc" --version | grep -q 'release 13\.' && [ -e "$1/include/cuda.h" ]; }
if [ "${1:-}" != --fetch ]; then
  for home in "${CUDA_HOME:-}" /usr/local/cuda "$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /none/none)")")")"; do
    if [ -n "$home" ] && is_13 "$home"; then echo "$home"; exit 0; fi
  done
fi
cache=${DSPARK_CUDA_CACHE:-$HOME/.cache/dspark/cuda-13.0}
if ! is_13 "$cache/nvidia/cu13"; then
  [ "$(uname -m)" = x86_64 ] || [ "$(uname -m)" = aarch64 ] || { echo "NVIDIA has no CUDA compiler for $(uname -m)" >&2; exit 1; }
  mkdir -p "$(dirname "$cache")"
  work=$(mktemp -d "$cache.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  echo "fetching a CUDA 13.0 compiler (130 MB) into $cache" >&2
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$work" nvidia-cuda-nvcc==13.0.* nvidia-cuda-crt==13.0.* nvidia-nvvm==13.0.* \
    nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.* >&2
  find "$work/nvidia/cu13/bin" "$work/nvidia/cu13/nvvm/bin" -type f -exec chmod +x {} +
  rm -rf "$cache"
  mv "$work" "$cache"
  trap - EXIT
  is_13 "$cache/nvidia/cu13" || { echo "$cache/nvidia/cu13: no CUDA 13 compiler came out of the packages; remove the folder and try again" >&2; exit 1; }
fi
echo "$cache/nvidia/cu13"
