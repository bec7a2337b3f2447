"""The one thing pyproject.toml cannot say: the C extension is built by cffi."""

from setuptools import setup

setup(cffi_modules=["cspec/build.py:ffibuilder"])
