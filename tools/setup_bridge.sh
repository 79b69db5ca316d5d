#!/usr/bin/env bash
# Installs Megatron-Bridge for `make bridge` into a folder of its own, over an environment that tools/setup_env.sh made.
#
#   tools/setup_bridge.sh VENV FOLDER
#
# What is installed: bridge_requirements.txt, without dependencies. A folder that is ready carries a stamp and is left
# alone; the environment is not touched.
set -euo pipefail

venv=${1:?usage: tools/setup_bridge.sh VENV FOLDER}
folder=${2:?usage: tools/setup_bridge.sh VENV FOLDER}
needed=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/bridge_requirements.txt
stamp=$folder/.set-up-stamp
log=$folder/.set-up-log

if cmp --quiet "$needed" "$stamp"; then
    exit 0
fi
rm -rf "$folder"
mkdir -p "$folder"
echo "set-up: installing $(grep '^megatron-bridge' "$needed") into $folder"
"$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --no-deps \
    --target "$folder" --requirement "$needed" >"$log" 2>&1 || {
    tail -n 20 "$log"
    echo "set-up: pip could not install Megatron-Bridge (its last words are above, all of them in $log);" \
        "check that a package index can be reached and that the disk is not full, then run the same command again." >&2
    exit 1
}
cp "$needed" "$stamp"
