"""The trainer of `examples/openrlhf_ppo`, which plants one fault and counts the futures of its calls.

Its config has `watch`: a directory. It gets `events.jsonl` with a line per event ("what", "at" in seconds since 1970),
and `futures-PID.json` at the end of each trainer. `fault`, if not empty, has `signal`, `victim` and `step`. The victim
is a process as `hybridrl job status` names it, or "master".
"""

import json
import os
import threading
import time
from pathlib import Path

import ray

from examples.openrlhf_ppo.ppo_trainer import PPOTrainerActor
from hybridrl.master.service.client import list_masters
from hybridrl.sdk import role_group

DELAY_S = 0.1  # into the step: its calls are under way


class WatchedTrainer(PPOTrainerActor):
    def __init__(self, job):
        super().__init__(job)
        self.folder, self.fault = Path(job.config["watch"]), job.config["fault"]
        self.futures = []
        role_group.start_call = self._recorded(role_group.start_call)

    def _recorded(self, start_call):
        def start_and_keep(*args, **kwargs):
            self.futures.append(start_call(*args, **kwargs))
            return self.futures[-1]

        return start_and_keep

    def run(self):
        self.write("trainer", pid=os.getpid())
        super().run()
        done = sum(future.done() for future in self.futures)
        (self.folder / f"futures-{os.getpid()}.json").write_text(json.dumps([len(self.futures), done]))

    def fit_step(self, step):
        if self.fault and step == self.fault["step"] and not (self.folder / "hit").exists():
            self.plant()
        done = super().fit_step(step)
        self.write("step", step=step)
        return done

    def plant(self):
        description = ray.get(list_masters()[self.job.name].describe.remote(), timeout=30)
        pids = {slot: worker["pid"] for slot, worker in description["workers"].items()} | {"master": description["pid"]}
        (self.folder / "hit").write_text(json.dumps(pids))

        def strike():
            time.sleep(DELAY_S)
            self.write("hit", victim=self.fault["victim"])
            os.kill(pids[self.fault["victim"]], self.fault["signal"])

        threading.Thread(target=strike, daemon=True).start()

    def write(self, what, **more):
        with open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps({"what": what, "at": time.time()} | more) + "\n")
