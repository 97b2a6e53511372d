"""Packaging of vk-cocoon: a handful of top-level modules and the simulator package."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
# Parsed, not imported: importing vkcocoon monkey-patches the process that builds us.
VERSION = re.search(r'^__version__ = "([^"]+)"$', (HERE / "vkcocoon.py").read_text(), re.M).group(1)

RUNTIME = [
    "click>=8.2",
    "cryptography>=43",
    "gevent>=25.9.1",
    "kubernetes>=36",
    "paramiko>=4.0",
    "ping3>=5.1.5",
    "prometheus-client>=0.22",
    "PyYAML>=6.0.2",
    "structlog>=25.1",
]
SIM = ["rich>=14"]
DEV = [
    *SIM,
    "freezegun>=1.5.5",
    "hypothesis>=6.140",
    "mypy>=1.18",
    "pytest>=9",
    "pytest-cov>=7",
    "pytest-randomly>=4",
    "pytest-timeout>=2.4",
    "ruff>=0.14",
    "types-gevent",
    "types-paramiko",
    "types-PyYAML",
]

setup(
    name="vk-cocoon",
    version=VERSION,
    description="A kubelet for Cocoon microVMs and macOS guests, with a simulator of everything around it.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    py_modules=sorted(path.stem for path in HERE.glob("vkcocoon*.py")),
    packages=["simulator"],
    package_data={"simulator": ["py.typed", "scenarios/*.yaml", "examples/*.yaml"]},
    install_requires=RUNTIME,
    extras_require={"sim": SIM, "dev": DEV},
    entry_points={"console_scripts": ["vk-cocoon=vkcocoon_entry:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
