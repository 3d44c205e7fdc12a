"""GGUF files as models: each is converted once to a Hugging Face folder, which replaces the file in the settings.

`load_config` and `compose_settings` call `with_model_folders`, so checks, workers and checkpoints get a plain folder.
`hybridrl` commands with a model as an argument call `model_folder`. All of this runs in the driver.

transformers dequantises the weights to float32 in a process of its own (`python -m hybridrl.config.gguf_models`). Its
memory is free again after it, and the driver, which forks, loads no torch here. The folder appears under
`$HF_HOME/hybridrl/gguf` by one rename. Its name has a hash of the file's content, so each machine finds or makes the
same one.
"""

import functools
import hashlib
import logging
import os
import shutil
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.config.introspection import keys, value_at, with_value
from hybridrl.errors import GGUF_FOLDER, ConfigError, reason_of
from hybridrl.system.atomic_write import fsync_path
from hybridrl.system.child_process import ChildProcess
from hybridrl.system.machine import machine_id

logger = logging.getLogger(__name__)
Config = TypeVar("Config")
SUFFIX, MAGIC = ".gguf", b"GGUF"
PACKAGES = ("gguf", "accelerate")  # that transformers needs to read the file
TEACHERS = "distillation.teacher_models"
TIMEOUT_S = 2 * 3600.0  # of a conversion: 100 GB at 15 MB/s
HEAD_BYTES = 16 << 20  # hashed whole: metadata and vocabulary, which people edit in place
NUM_SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of the weights: reading them all would cost minutes at every start
INSTEAD = "give the model as a Hugging Face directory"
REASON = "reason.txt"  # in the unfinished folder: why there is no conversion


def with_model_folders(config: Config) -> Config:
    """Return the config with the folder of each GGUF file that it names as a model.

    Raises:
        ConfigError: A file cannot be converted.
    """
    schema: type = type(config)
    for key in keys(schema):
        value = value_at(config, key)
        if key.endswith("model.path") and is_gguf(value):
            config = with_value(config, key, model_folder(value, key=key))
        elif key == TEACHERS:
            config = with_value(config, key, {name: _teacher(name, value[name]) for name in value})
    return config


def is_gguf(path: Any) -> bool:
    """Return whether a value is the path of a GGUF file."""
    return isinstance(path, str) and path.endswith(SUFFIX)


@functools.cache
def _log_use(path: str, folder: Path) -> None:
    logger.info("%s: its conversion in %s is used", path, folder)


def model_folder(path: str, *, key: str) -> str:
    """Return the folder of a GGUF file, converted if need be; any other path as it is.

    Args:
        path: Directory, name on the Hugging Face hub, or GGUF file.
        key: Setting or argument that holds `path`, for errors.

    Raises:
        ConfigError: There is no such file, it is damaged or not supported, or a package is missing.
    """
    if not is_gguf(path) or os.path.isdir(path):
        return path
    file, setting = Path(path).absolute(), f"{key}={path}"
    try:
        folder = conversion_folder(file)
        _check_start(file, setting)
    except OSError as error:
        raise ConfigError(f"{setting}: the file cannot be read ({error.strerror}); correct the path") from error
    if folder.is_dir():
        _log_use(path, folder)
        return str(folder)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"{setting}: a GGUF file is read with the packages {' and '.join(PACKAGES)}, and this environment has no "
            f"{' and no '.join(missing)}: pip install 'hybridrl[gguf]'"
        )
    logger.info("%s: converting it to float32 in %s, once", path, folder)
    _convert(file, folder, setting)
    return str(folder)


def conversion_folder(file: Path) -> Path:
    """Return where the conversion of a file is, or will be."""
    from huggingface_hub.constants import HF_HOME

    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(HEAD_BYTES))
        for number in range(NUM_SAMPLES):
            stream.seek(number * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return Path(HF_HOME).absolute() / GGUF_FOLDER / f"{file.stem}-{digest.hexdigest()[:16]}"


def _teacher(name: str, entry: Any) -> Any:
    """Return the entry of a teacher with the folder of its model."""
    if not isinstance(entry, dict) or not is_gguf(entry.get("model_path")):
        return entry
    return {**entry, "model_path": model_folder(entry["model_path"], key=f"{TEACHERS}.{name}.model_path")}


def _check_start(file: Path, setting: str) -> None:
    with file.open("rb") as stream:
        start = stream.read(len(MAGIC))
    if start != MAGIC:
        raise ConfigError(
            f"{setting}: is not a GGUF file: it begins with {start!r}, not with {MAGIC!r}; copy or download it again"
        )


def _convert(file: Path, folder: Path, setting: str) -> None:
    """Return when `folder` is there. Several processes may convert the same file: one of their folders stays."""
    partial = folder.with_name(f"{_unfinished(folder)}{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        child = ChildProcess([sys.executable, "-m", __name__, *map(str, (file, partial, folder))])
        try:
            child.wait(TIMEOUT_S)
        finally:
            ended = child.describe_exit(child.end())
        if not folder.is_dir():
            reason = f"the process that converts it {ended}"
            with suppress(FileNotFoundError):
                reason = (partial / REASON).read_text(encoding="utf-8")
            raise ConfigError(f"{setting}: {reason}")
    except OSError as error:
        raise ConfigError(
            f"{setting}: its conversion cannot be written to {folder.parent} ({error.strerror}); set HF_HOME to a "
            "directory with room for 4 bytes per parameter"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unfinished(folder: Path) -> str:
    """Return the beginning of the names of unfinished folders of this machine; the process id follows."""
    return f".{folder.name}.{hashlib.sha256(machine_id().encode()).hexdigest()[:8]}."


def _remove_leftovers(folder: Path) -> None:
    """Remove unfinished folders of processes that were killed."""
    for left in folder.parent.glob(f"{_unfinished(folder)}*"):
        if not os.path.exists(f"/proc/{left.name.rpartition('.')[2]}"):
            shutil.rmtree(left, ignore_errors=True)


# -- in the process that converts


def main(words: list[str]) -> int:
    """Convert the file to the partial folder and rename that; a failure leaves its reason there."""
    file, partial, folder = map(Path, words)
    partial.mkdir()
    silent = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # progress bars and warnings of other libraries
        os.dup2(silent, descriptor)
    try:
        _write(file, partial)
        _publish(partial, folder)
    except Exception as error:  # the parent raises it with the setting
        reason = str(error) if isinstance(error, ConfigError) else f"it cannot be converted: {_one_line(error)}"
        (partial / REASON).write_text(reason, encoding="utf-8")
        return 1
    return 0


def _write(file: Path, folder: Path) -> None:
    """Write model and tokenizer to the folder. Raises ConfigError with the reason if that is impossible."""
    import transformers
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:  # without it a list of 2**60 entries in a file of 60 bytes is read for ever
                raise ValueError(f"it ends before byte {offset}")
            return found

    try:
        BoundedReader(file)
    except Exception as error:  # its code believes the file, so a damaged one may raise anything
        raise ConfigError(
            f"the GGUF file is damaged or cut off ({_one_line(error)}); copy or download it again"
        ) from error
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        if hasattr(transformers, "GgufConfig"):  # without it some architectures keep their blocks
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **source, dtype="float32", output_loading_info=True
        )
    except Exception as error:
        raise ConfigError(
            f"transformers {transformers.__version__} cannot use this GGUF file ({_one_line(error)}); {INSTEAD}"
        ) from error
    model, report = loaded
    if lacking := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ConfigError(f"the GGUF file lacks {len(lacking)} weights of its model, such as {lacking[0]}; {INSTEAD}")
    model.hf_quantizer = None  # with it, and with the config's entry, transformers does not save
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _publish(partial: Path, folder: Path) -> None:
    for path in (*partial.iterdir(), partial):
        fsync_path(path)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    fsync_path(folder.parent)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {reason_of(error):.300}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
