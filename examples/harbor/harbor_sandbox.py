"""`SandboxEnvironment`: an environment of the package `harbor` that needs no container, for tasks that need no image.

Its commands run in a `SandboxSession` of this machine: with the machine's programs, without a network, as one user
without rights. `harbor_task.py` takes it for `environment: sandbox`; the package itself can be given its import path.
The process needs `harbor`, this folder and hybridrl on its path, and of what hybridrl needs only `lazy_loader`.
"""

import asyncio
import base64
import io
import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, transfer_tar_filter
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor_dockerfile import Image, read_image
from sandbox_session import SandboxSession, system_directories

from hybridrl.rewards.sandbox import Limits, Outcome, Verdict

WRITABLE = (
    "/app",
    "/data",
    "/home",
    "/logs",
    "/mnt",
    "/opt",
    "/root",
    "/solution",
    "/srv",
    "/tests",
    "/var",
    "/workspace",
)
LONGEST_S = 86_400.0  # of a command without a limit
SMALLEST_TRANSFER_KB = 1024
STATUS = {Verdict.TIMEOUT: 124, Verdict.MEMORY: 137, Verdict.OUTPUT_LIMIT: 141, Verdict.REFUSED: 126}


class TreeUnusable(RuntimeError):
    """Files cannot be written, because of what commands have done to the tree: the sandbox itself works."""

    is_of_policy = True


class SandboxEnvironment(BaseEnvironment):
    """A directory tree of its own, which ends with the environment.

    `environment/Dockerfile` says what is in it (`harbor_dockerfile.py`). Its image is not used.

    Args:
        memory_mb: Of each command, where the task does not say it.
        disk_mb: Of all files together. They are in the machine's memory.
        processes: Of each command, at the same time.

    Raises:
        ValueError: The task needs what this environment does not have. Names the file and the line.
    """

    def __init__(
        self, *args: Any, memory_mb: int = 1024, disk_mb: int = 256, processes: int = 32, **kwargs: Any
    ) -> None:
        self._image: Image | None = None
        super().__init__(*args, **kwargs)
        given_mb = self.task_env_config.memory_mb or memory_mb
        self._limits = Limits(LONGEST_S, given_mb, processes, open_files=256, disk_mb=disk_mb)
        self._session: SandboxSession | None = None

    @staticmethod
    def type() -> str:
        return "sandbox"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True)

    @classmethod
    def preflight(cls) -> None:
        """Raise SandboxUnavailable with the reason if this machine has no sandbox."""
        SandboxSession().close()

    def _validate_definition(self) -> None:
        self._image = read_image(self.environment_dir, workdir=self.task_env_config.workdir)
        taken = system_directories()
        for path in self._image.directories():
            if path in taken:
                raise ValueError(f"{self.environment_dir}: writes to {path}, which the sandbox shows read-only")

    async def start(self, force_build: bool) -> None:
        """Make the tree, and do what the Dockerfile says. Raises ValueError for a command of it that fails."""
        image = self._image
        assert image is not None
        taken = system_directories()
        writable = sorted({*image.directories(), *(path for path in WRITABLE if path not in taken)})
        self._session = await asyncio.to_thread(SandboxSession, writable=writable, limits=self._limits)
        await self.ensure_dirs(
            ["/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests", image.workdir], chmod=False
        )
        for number, instruction in enumerate(image.steps, start=1):
            if instruction.sources:
                await self._copy(instruction.sources)
                continue
            result = await self.exec(instruction.command, cwd=instruction.directory, env=dict(instruction.variables))
            if result.return_code != 0:
                printed = f"{result.stdout}{result.stderr}".strip()[-300:]
                raise ValueError(
                    f"{self.environment_dir}/Dockerfile: step {number}, RUN {instruction.command!r:.200}, ended with "
                    f"status {result.return_code} in the sandbox, which has no network and no image: {printed}"
                )
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.cancel()
            await asyncio.to_thread(session.close)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command with its own processes. `user` is not looked at: the sandbox has one, without rights."""
        outcome = await self._run(command, cwd=cwd, env=env, wall_s=timeout_sec)
        status = outcome.exit_status if outcome.exit_status is not None else STATUS.get(outcome.verdict, 1)
        status = STATUS.get(outcome.verdict, status if status >= 0 else 128 - status)
        why = f"[{outcome.detail}]\n" if outcome.verdict not in (Verdict.OK, Verdict.RUNTIME_ERROR) else ""
        return ExecResult(stdout=outcome.stdout, stderr=outcome.stderr + why, return_code=status)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._upload(_archive({PurePosixPath(target_path).name: Path(source_path)}), _parent(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(_archive({".": Path(source_dir)}), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        name, target = PurePosixPath(source_path).name, Path(target_path)
        with await self._download(_parent(source_path), name) as archive:
            member = archive.extractfile(name)
            if member is None:
                raise FileNotFoundError(f"{source_path} is no ordinary file")
            target.write_bytes(member.read())

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        with await self._download(source_dir, ".") as archive:
            archive.extractall(target_dir, filter=transfer_tar_filter)

    async def _run(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        wall_s: float | None = None,
        stdin: bytes = b"",
        output_kb: int = 1024,
    ) -> Outcome:
        session, image, limits = self._session, self._image, self._limits
        if session is None or image is None:
            raise RuntimeError("the environment has not been started")
        limits = Limits(
            wall_s or LONGEST_S, limits.memory_mb, limits.processes, limits.open_files, output_kb, limits.disk_mb
        )
        running = asyncio.to_thread(
            session.run,
            command,
            directory=cwd or image.workdir,
            environment=image.variables | (self._merge_env(env) or {}),
            stdin=stdin,
            limits=limits,
        )
        try:
            return await running
        except asyncio.CancelledError:
            session.cancel()
            raise

    async def _upload(self, archive: bytes, directory: str) -> None:
        where = shlex.quote(directory)
        outcome = await self._run(f"mkdir -p {where} && tar -xf - -C {where}", cwd="/", stdin=archive)
        if not outcome.ok:
            raise TreeUnusable(f"files could not be written to {directory}: {outcome.detail} {outcome.stderr[:300]}")

    async def _copy(self, sources: Mapping[str, Path]) -> None:
        """Write files and directories of the task to absolute paths."""
        for target, path in sources.items():
            if path.is_dir():
                await self.upload_dir(path, target)
            else:
                await self.upload_file(path, target)

    async def _download(self, directory: str, name: str) -> tarfile.TarFile:
        """Return files as an archive, which the policy may have made: extract it with a filter."""
        largest_kb = max(SMALLEST_TRANSFER_KB, self._limits.disk_mb << 11)
        command = f"tar -cf - -C {shlex.quote(directory)} -- {shlex.quote(name)} | base64 -w 0"
        outcome = await self._run(f"set -o pipefail; {command}", cwd="/", output_kb=largest_kb)
        if not outcome.ok:
            raise RuntimeError(f"{directory}/{name} could not be read: {outcome.detail} {outcome.stderr[:300]}")
        return tarfile.open(fileobj=io.BytesIO(base64.b64decode(outcome.stdout)))


def _archive(files: dict[str, Path]) -> bytes:
    """Return files and directories as a tar archive, by the name in it."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, path in files.items():
            archive.add(path, arcname=name)
    return data.getvalue()


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)
