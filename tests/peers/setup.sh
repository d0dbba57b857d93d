#!/usr/bin/env bash
# Makes the Python environment of `make test-peers` from PyPI, once, in the cache folder, and prints that folder: venv/bin/python is in it.
# Nothing outside the cache folder is touched; a change of requirements.txt makes it anew.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${XDG_CACHE_HOME:-$HOME/.cache}/dspark/peers
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "test-peers: speculators' versions in requirements.txt need Python 3.11 or newer, python3 is $(python3 -V 2>&1)" >&2; exit 1; }
mkdir -p "$dir"
exec 9> "$dir/lock"
flock 9
want=$( (python3 -V; cat "$here/requirements.txt") | sha256sum)
if [ "$(cat "$dir/ready" 2>/dev/null)" != "$want" ] || [ ! -x "$dir/venv/bin/python" ]; then
  echo "installing $(grep -c == "$here/requirements.txt") Python packages (about 3 GB to fetch, 6 GB on disk) into $dir" >&2
  rm -rf "$dir/ready" "$dir/venv"
  # Without its own pip: Debian's python3 has ensurepip only in an extra package, and the system's pip can install into it.
  python3 -m venv --without-pip "$dir/venv"
  python3 -m pip --python "$dir/venv/bin/python" install --quiet --disable-pip-version-check --no-input --no-cache-dir -r "$here/requirements.txt" >&2
  echo "$want" > "$dir/ready"
fi
echo "$dir"
