"""Generates the stubs before setuptools collects the packages, for wheels and editable installs."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))

from generate import generate


class BuildPyWithStubs(build_py):
    """build_py that runs protoc in place first."""

    def run(self) -> None:
        generate()
        super().run()


setup(cmdclass={"build_py": BuildPyWithStubs})
