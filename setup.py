"""The one thing that pyproject.toml cannot say: build the C kernel with cffi."""

from setuptools import setup

setup(cffi_modules=["shared/kernel/build.py:make_builder"])
