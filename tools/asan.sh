#!/bin/sh
# Builds the C kernel with the address and undefined behaviour sanitizers, in .asan, and runs its tests under them.
# Small Python objects come from malloc too, so that accesses beyond their end are seen.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export KVSTORE_SANITIZE=1
"$python" setup.py -q build --build-base .asan/build --build-lib .asan/lib
export PYTHONPATH="$PWD/.asan/lib:$PWD/tests" PYTHONMALLOC=malloc
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
cd .asan
[ $# -gt 0 ] || set -- ../tests/test_bkvd.py ../tests/test_bkvd_chain.py ../tests/test_bkvd_content.py ../tests/test_bkvd_vectors.py
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" exec "$python" -m pytest -q \
    -c ../pyproject.toml --rootdir .. -p no:cacheprovider "$@"
