"""A client program that goes on after it was killed: `python sdk_resume.py URL BASE_MODEL PROGRESS_FILE STEPS`."""

import json
import os
import sys
from pathlib import Path

os.environ.update(TINKER_API_KEY="tml-local", TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")

import numpy as np
import tinker
from tinker import types


def rows(step):
    """Random rows of a step, as cross_entropy reads them."""
    rng = np.random.default_rng(step)
    for length in (6, 9, 7):
        tokens = rng.integers(10, 200, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        yield types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={name: types.TensorData.from_numpy(value) for name, value in inputs.items()},
        )


def main(url, base_model, progress, steps):
    service, progress = tinker.ServiceClient(base_url=url), Path(progress)
    done = json.loads(progress.read_text()) if progress.exists() else {"path": None, "losses": []}
    if done["path"] is None:
        model = service.create_lora_training_client(base_model=base_model, rank=8, seed=1).result()
    else:
        model = service.create_training_client_from_state_with_optimizer(done["path"]).result()
    for step in range(len(done["losses"]), int(steps)):
        passed = model.forward_backward(list(rows(step)), "cross_entropy")
        model.optim_step(types.AdamParams(learning_rate=5e-3, grad_clip_norm=1.0)).result()
        path = model.save_state(f"step-{step}").result().path
        done = {"path": path, "losses": [*done["losses"], passed.result().metrics["loss:sum"]]}
        partial = progress.with_suffix(".partial")
        partial.write_text(json.dumps(done))
        partial.rename(progress)
    print("done:", *done["losses"])


if __name__ == "__main__":
    main(*sys.argv[1:])
