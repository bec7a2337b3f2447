"""What pyproject.toml cannot say: the C extension is built by cffi, once for every Python from 3.10 on."""

from setuptools import setup

setup(
    cffi_modules=["cspec/build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
