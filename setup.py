"""Builds the C module; everything else is in pyproject.toml."""

import sysconfig

from setuptools import setup

# The module keeps to the limited API, so one wheel serves every CPython from 3.10 on. Free-threaded builds have none.
limited = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    cffi_modules=["kvstore/native/build.py:ffi"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {},
)
