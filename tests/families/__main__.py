"""Print the page about model families:

    python -m tests.families > docs/families.md

It measures tiny models of every family on the CPU, in 20 seconds of CPU time. Two tables take longer, and are measured
again only with `--vllm` (vllm_cpu.py) and `--speed` (speed.py).
"""

import argparse
import json
import math
import re

import torch
import torch.distributed as dist
from transformers.utils import logging

from hybridrl.workers.engine.attention.layer_kinds import LAYERS, words
from hybridrl.workers.weight_transfer.fingerprint import FLOAT32
from tests.families import speed, vllm_cpu
from tests.families.configurations import FAMILIES
from tests.families.measure import LAYOUTS, Cell, Row, measure_family

BEGINNING = """# Model families

FSDP and the `hf` rollout run the text models of transformers. `python -m tests.families > docs/families.md` prints this
page: it compares tiny models of these families with plain transformers in float32. Other families follow the same
rules, because every decision depends on kinds of layers, and none on a model's name.

| family | layers | padded | packed | shared prefixes | rollout | export | resume | Megatron |
|---|---|---|---|---|---|---|---|---|"""
COLUMNS = """
* padded, packed, shared prefixes: largest difference of log-probs / of gradients between the engine and transformers'
  plain attention, row by row; rows are turns of conversations that share prefixes at several depths
* rollout: log-probs of the `hf` rollout, to which trained weights were pushed in place of random ones, against the
  engine; some rows end early. transformers' code for one token leaves out Nemotron-H's `time_step_min`
* export: the exported model in transformers against the engine
* resume: whether a loaded engine continues bit for bit

## Kinds of layers
"""
KINDS = """
The names are those of a configuration's `layer_types`, or say what else the configuration or a module has
([code](../hybridrl/workers/engine/attention/layer_kinds.py)). A model with another kind is refused with
`model.use_remove_padding=true`; `use_prefix_grouper=true` has no effect then, and a line in the log says so.

Sinks and soft caps are never left out. Where transformers' kernel would do that, the model's own plain attention
(`eager`) computes, and a line in the log says so. Choosing such a kernel with
`model.override_config.attn_implementation` is an error. Plain torch takes memory for queries times keys of a sequence.

Recurrent layers run transformers' torch code where `causal_conv1d`, `flash-linear-attention` or `mamba_ssm` is not
installed; transformers logs which one is missing. A segment that others continue keeps its last state and the last
inputs of the convolution. They start from both, so that they and their gradients are exact.

A checkpoint of Qwen3.5 that has more than text trains as a model of text, unless it is asked to read
[images](images.md#qwen35-text-or-images). An export keeps its vision tower and its
heads that predict several tokens (MTP), under the names of the checkpoint; neither is trained. The same holds for MTP
of other families.
"""
LEARN = """
## Two of them learn

The quick start makes a tiny model of another family, and its GRPO takes more settings (`make learn` runs both):

```bash
FAMILY=gpt_oss bash examples/quickstart/run.sh outputs/gpt_oss \\
  actor_rollout_ref.actor.router_replay.mode=R3 actor_rollout_ref.rollout.enable_rollout_routing_replay=true
FAMILY=qwen3_5_text bash examples/quickstart/run.sh outputs/qwen3_5
```

Held-out accuracy rose from 0.160 to 0.980 for gpt-oss, from 0.158 to 0.941 for Qwen3.5, in 10 and 21 minutes on two
busy cores. The quick start's own Qwen2 reaches 0.994.
"""
KEPT = """
## Tensors in float32

A rollout in bfloat16 holds these in float32, and they are pushed to it and hashed in float32. vLLM stores the others in
its own dtype, so they are pushed in that. An FSDP engine that computes in bfloat16 rounds parameters for its own
passes, `A_log` too; buffers keep their bits.
"""
SPEED = """
### How slow that is

Tokens per CPU second of an update (`python -m tests.families --speed`): tiny models, one thread, eight rows of 40 to
240 tokens; 45 % of the padded batch is padding.

| family | padded | packed | packed / padded |
|---|---|---|---|"""
VLLM = """
## vLLM on the CPU

What `python -m tests.families --vllm` saw with vLLM 0.32: a trained model is pushed to the `vllm` rollout, which had
random weights, and log-probs of what it generates are compared with the engine's in float32. Heads have 32 dimensions.
In bfloat16 a router may choose other experts than in float32. In the last column the engine replays the rollout's (R3).
Where two families differ in bfloat16, so they do in transformers: with `hf` Llama has 0.1, gpt-oss and Qwen3-Next 0.5.

| family | float32 | bfloat16 | bfloat16, routes replayed |
|---|---|---|---|"""
NOTES = """
## What the runs logged
"""


def page() -> str:
    rows = {family: measure_family(family) for family in FAMILIES}
    table = [_line(family, row) for family, row in rows.items()]
    first = [BEGINNING, *table, COLUMNS, *_kinds(), KINDS.rstrip(), SPEED, *_speed()]
    return "\n".join([*first, VLLM, *_vllm(), LEARN.rstrip(), KEPT, *_kept(), *_notes(rows)]) + "\n"


def _line(family: str, row: Row) -> str:
    cells = [_numbers(row.layouts[name]) for name in LAYOUTS]
    resume = "yes" if row.resumes else "no"
    megatron = "no" if row.megatron else "yes"
    others = [_numbers(row.rollout), _numbers(row.export), resume, megatron]
    return f"| {' | '.join([family, words(row.kinds), *cells, *others])} |"


def _numbers(cell: Cell) -> str:
    numbers = [number for number in (cell.log_probs, cell.gradients) if not math.isnan(number)]
    return "refused" if cell.refusal else " / ".join(f"{number:.0e}" if number else "0" for number in numbers)


def _kinds() -> list[str]:
    lines = ["| layers | name | packed | shared prefixes |", "|---|---|---|---|"]
    return lines + [f"| {layer.words} | `{kind}` | {layer.packed} | {layer.shared} |" for kind, layer in LAYERS.items()]


def _speed() -> list[str]:
    found = json.loads(speed.RESULTS.read_text(encoding="utf-8"))
    rows = ((family, *found[family]) for family in FAMILIES)
    return [f"| {family} | {padded:,} | {packed:,} | {packed / padded:.1f} |" for family, padded, packed in rows]


def _vllm() -> list[str]:
    found, lines, reasons = json.loads(vllm_cpu.RESULTS.read_text(encoding="utf-8")), [], []
    for family in FAMILIES:
        cells = found[family]
        lines.append(f"| {family} | {' | '.join(_vllm_cell(cells.get(case)) for case in vllm_cpu.CASES)} |")
        for what in ("refused", "failed"):
            text = cells["float32"].get(what, "").removeprefix("actor_rollout_ref.rollout.name=vllm: ")
            reasons += [f"* {family}, {what}: {re.split('; use|. Use', text)[0]}"] if text else []
    return [*lines, "", *reasons] if reasons else lines


def _vllm_cell(cell: dict[str, str] | None) -> str:
    return "" if cell is None else cell.get("difference", next(iter(cell)))


def _kept() -> list[str]:
    lines = ["| tensors | what they do | held so by |", "|---|---|---|"]
    for row in FLOAT32:
        engines = "`hf`, `vllm`" if row.everywhere else "`hf`"
        lines.append(f"| `{row.ending.removeprefix('.')}` | {row.reason} | {engines} |")
    return lines


def _notes(rows: dict[str, Row]) -> list[str]:
    lines = [f"* {family}: {note}" for family, row in rows.items() for note in row.notes]
    return [NOTES, *lines] if lines else []


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.families")
    parser.add_argument("--vllm", action="store_true", help="run every family through vLLM again")
    parser.add_argument("--speed", action="store_true", help="measure tokens per second again")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.vllm:
        vllm_cpu.measure_all()
    if chosen.speed:
        speed.measure_all()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(page(), end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
