#!/usr/bin/env bash
# Makes an environment ready for the demo and the tests, or says in one sentence what stands in the way.
#
#   tools/setup_env.sh VENV
#
# What is installed: the dependencies in pyproject.toml, at the versions in constraints.txt. The checkout itself is not,
# so that several checkouts can share one environment; they run with PYTHONPATH. An environment that is ready carries a
# stamp and is left alone.
#
# Read from the environment: PYTHON (the interpreter to use), PYENV_ROOT, MCE_MIN_FREE_GB, MCE_LOCK_SECONDS.
set -euo pipefail

venv=${1:?usage: tools/setup_env.sh VENV}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
pyproject=$here/../pyproject.toml
constraints=$here/constraints.txt
fingerprint=$(cat "$pyproject" "$constraints" "$here/setup_env.sh" | sha256sum | cut -d' ' -f1)
python=$venv/bin/python
stamp=$venv/.set-up-stamp
log=$venv/.set-up-log

say() { printf 'set-up: %s\n' "$*"; }

fail() { say "$*" >&2; exit 1; }

is_ready() { [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ]; }

# A pyenv shim exists for every version that pyenv has, and fails unless that version is selected: only running tells.
is_usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_interpreter() {
    local candidates=("${PYTHON:-}") candidate
    if [ -z "${PYTHON:-}" ]; then
        candidates=(python3.12 python3.13 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23].*/bin/python python3)
    fi
    for candidate in "${candidates[@]}"; do
        if is_usable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "Python 3.12 or newer with its venv module is needed and none of these is one: ${candidates[*]};" \
        "install Python 3.12, or name an interpreter with PYTHON=PATH."
}

require_disk() {
    local needed=${MCE_MIN_FREE_GB:-9} free
    free=$(df -Pk "$venv" | awk 'NR == 2 { print int($4 * 1024 / 1e9) }')
    [ "$free" -ge "$needed" ] ||
        fail "an environment needs $needed GB of free disk and $venv has $free GB;" \
            "free some, or choose another place with VENV=PATH."
}

make_environment() {
    if is_usable "$python" && "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local interpreter
    interpreter=$(find_interpreter)
    say "making $venv with $interpreter"
    "$interpreter" -m venv "$venv" >"$log" 2>&1 && is_usable "$python" ||
        fail "$interpreter could not make an environment with Python 3.12 or newer in $venv ($(tail -n 1 "$log"));" \
            "remove that folder, or choose another place with VENV=PATH."
}

pip_install() {
    "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --constraint "$constraints" "$@" >"$log" 2>&1 && return
    tail -n 20 "$log"
    fail "pip could not install what is needed (its last words are above, all of them in $log);" \
        "check that a package index can be reached and that the disk is not full, then run the same command again."
}

# Prints the dependencies in pyproject.toml, with those of the named extras.
requirements() {
    "$python" - "$pyproject" "$@" <<'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = (project["optional-dependencies"][extra] for extra in sys.argv[2:])
print(*sum(extras, start=project["dependencies"]), sep="\n")
PYTHON
}

glibc_is_older_than() {
    local glibc
    glibc=$(getconf GNU_LIBC_VERSION | cut -d' ' -f2)
    [ "$glibc" != "$1" ] && [ "$(printf '%s\n' "$glibc" "$1" | sort -V | head -n 1)" = "$glibc" ]
}

# The NVRx wheels are tagged for glibc 2.39. On an older one pip passes them over without a word and takes 0.4.1, with
# which Megatron does not even import; the checkpointing part is pure Python and runs, so the tag alone is overruled.
install_nvrx_despite_its_tag() {
    local pinned present version
    pinned=$(sed -n 's/^nvidia-resiliency-ext==//p' "$constraints")
    present=$("$python" -m pip show nvidia-resiliency-ext 2>/dev/null | sed -n 's/^Version: //p' || true)
    [ "$present" != "$pinned" ] || return 0
    say "installing nvidia-resiliency-ext $pinned past its glibc 2.39 tag (its checkpointing part is pure Python)"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    pip_install defusedxml nvidia-ml-py packaging psutil pyyaml
    pip_install --upgrade --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
        --platform "manylinux_2_39_$(uname -m)" --target "$venv/lib/python$version/site-packages" \
        nvidia-resiliency-ext
}

install_packages() {
    local needed
    if glibc_is_older_than 2.39; then
        needed=$(requirements dev msc plot)
        mapfile -t needed <<<"$needed"
        pip_install "${needed[@]}"
        install_nvrx_despite_its_tag
    else
        needed=$(requirements dev msc plot nvrx)
        mapfile -t needed <<<"$needed"
        pip_install "${needed[@]}"
    fi
}

if is_ready; then
    exit 0
fi
mkdir -p "$venv"
exec 9>"$venv/.set-up-lock"
flock --timeout "${MCE_LOCK_SECONDS:-3600}" 9 ||
    fail "another set-up holds $venv; wait for it, or choose another place with VENV=PATH."
if is_ready; then
    exit 0
fi
rm -f "$stamp"
compgen -G "$venv/lib/python3.*/site-packages/torch/version.py" >/dev/null || require_disk
make_environment
say "installing into $venv (the first time about 3 GB are downloaded)"
install_packages
printf '%s\n' "$fingerprint" >"$stamp"
say "$venv is ready"
