"""Sums of the step ledger of a run, read as it grows; `step_ledger` checks it."""

from typing import Any

from hybridrl.trainer.checkpoint.ledger_audit import COMMAND
from hybridrl.trainer.checkpoint.step_ledger import FILE
from hybridrl.view.readers.storage import Folder, LineTail, parsed

KINDS = {"begin": int, "step": int, "rows": int, "prompts": list, "updates": dict, "stages": dict}


class LedgerReader:
    """The sums of one ledger."""

    def __init__(self, folder: Folder) -> None:
        self._folder, self._tail = folder, LineTail(folder, FILE)
        self._reset()

    def _reset(self) -> None:
        self._prompts: dict[int, int] = {}  # step that is in the weights -> prompts that it trained on
        self._starts: list[dict[str, Any]] = []
        self._updates: dict[str, int] = {}
        self._num_repeated, self._rows = 0, 0
        self._more_than_once: list[str] = []

    def read(self) -> dict[str, Any]:
        """Return the sums: steps, repeated steps, starts, optimizer steps, prompts, stages that ran twice."""
        for _, line in self._tail.lines(on_replaced=self._reset):
            entry = parsed(line) or {}
            if not all(isinstance(entry[name], kind) for name, kind in KINDS.items() if name in entry):
                continue
            if "begin" in entry:
                self._start(entry)
            elif "step" in entry:
                self._end_step(entry)
        return {
            "steps": len(self._prompts),
            "last_step": max(self._prompts, default=None),
            "repeated": self._num_repeated,
            "prompts": sum(self._prompts.values()),
            "rows": self._rows,
            "updates": self._updates,
            "starts": self._starts[-100:],
            "more_than_once": self._more_than_once[-100:],
            "command": f"{COMMAND} {self._folder.url}",
        }

    def _start(self, entry: dict[str, Any]) -> None:
        undone = [step for step in self._prompts if step > entry["begin"]]
        for step in undone:
            del self._prompts[step]
        self._num_repeated += len(undone)
        self._rows = entry.get("rows", 0)
        self._starts.append({"after_step": entry["begin"], "from": entry.get("from"), "undone": len(undone)})

    def _end_step(self, entry: dict[str, Any]) -> None:
        self._prompts[entry["step"]] = len(entry.get("prompts", ()))
        self._updates = entry.get("updates", {})
        for stage, times in entry.get("stages", {}).items():
            if times != 1:
                self._more_than_once.append(f"step {entry['step']}: {stage} ran {times} times")
