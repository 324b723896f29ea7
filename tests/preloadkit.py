"""Reads that the kernel refuses with EIO: a library before libc's `pread`, for a child process. Linux with a C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static long n, first = -1, last = -1;
void fail_reads(long at, long times) { n = 0; first = at; last = at + times - 1; }
long reads(void) { return n; }

static int refused(int fd) {
    char link[64], name[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0) return 0;
    name[length] = 0;
    if (!strstr(name, "refused.store") || strstr(name, "-shm")) return 0;
    long at = __atomic_add_fetch(&n, 1, __ATOMIC_SEQ_CST);
    return at >= first && at <= last;
}

#define READ(name) \
    ssize_t name(int fd, void *to, size_t size, off_t at) { \
        static ssize_t (*real)(int, void *, size_t, off_t); \
        if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, #name); \
        if (refused(fd)) { errno = EIO; return -1; } \
        return real(fd, to, size, at); \
    }
READ(pread)
READ(pread64)
"""
PRELUDE = """
import ctypes, json, os, shutil, sys
_libc = ctypes.CDLL(None)
_libc.fail_reads.argtypes = [ctypes.c_long, ctypes.c_long]
_libc.reads.restype = ctypes.c_long
fail_reads, reads = _libc.fail_reads, _libc.reads
"""


def library(folder: Path) -> Path | None:
    """The library, made in `folder`; None where it cannot be."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if sys.platform != "linux" or compiler is None:
        return None
    source, made = folder / "refuse.c", folder / "refuse.so"
    source.write_text(SOURCE)
    done = subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source, "-ldl"], check=False)
    return made if done.returncode == 0 else None


def run(made: Path, script: str, *args: object) -> str:
    """What a Python script prints that has `fail_reads(at, times)` and `reads()`, of files named refused.store."""
    command = [sys.executable, "-c", PRELUDE + script, *map(str, args)]
    env = {**os.environ, "LD_PRELOAD": str(made)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
