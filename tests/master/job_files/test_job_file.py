"""What a job file describes is what the builder describes, and every mistake in one is a line that names the fix."""

import json
import time
from pathlib import Path

import pytest

from hybridrl.errors import ConfigError
from hybridrl.master.job_files.job_file import load_job_file, names_job_file
from hybridrl.master.jobs.builder import DLJobBuilder, RLJobBuilder
from hybridrl.master.plan.spec import Resource

YAML = """
name: small-grpo
device_type: CPU
config: {lr: 1e-6, layers: [1, 2]}
env: {GREETING: hello}
collocations: [[actor, rollout]]
feeds: [[rollout, reward, 2.5]]
weights: [[actor, rollout]]
workloads:
  trainer: {run: "project.train:Trainer", resource: {cpu: 2, memory: 512}}
  actor: {run: "project.workers:Actor", nnodes: 2, nproc_per_node: 2, max_restart: 3}
  rollout: {entry_point: "project.workers.Rollout", total: 2, env: {GREETING: rollout}}
  reward: {run: "project.workers:Reward", resource: {cpu: 0.5, tokens: 1}, spread: strict, node_labels: {zone: a}}
"""


def built():
    """The same job by a builder."""
    return (
        RLJobBuilder()
        .device_type("CPU")
        .config({"lr": 1e-6, "layers": [1, 2]})
        .global_env({"GREETING": "hello"})
        .trainer("project.train:Trainer")
        .resource(cpu=2, memory=512)
        .actor("project.workers:Actor")
        .nnodes(2)
        .nproc_per_node(2)
        .max_restart(3)
        .rollout("project.workers:Rollout")
        .total(2)
        .env({"GREETING": "rollout"})
        .reward("project.workers:Reward")
        .resource(cpu=0.5, tokens=1)
        .spread(strict=True)
        .node_labels({"zone": "a"})
        .with_collocation("actor", "rollout")
        .feeds("rollout", "reward", weight=2.5)
        .weights("actor", "rollout")
        .build()
    )


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def without_backend(spec):
    """The spec as JSON without DLRover's word for how an entry was given, which has no effect."""
    data = json.loads(spec.model_dump_json())
    return {**data, "roles": [{**role, "backend": ""} for role in data["roles"]]}


def test_workloads_in_a_file_are_the_job_of_the_builder(tmp_path):
    found = load_job_file(str(written(tmp_path, "grpo.yaml", YAML)))
    assert without_backend(found.job.spec) == without_backend(built().spec)
    assert (found.name, found.folder) == ("small-grpo", tmp_path)


def test_a_job_without_a_trainer_is_that_of_the_other_builder(tmp_path):
    text = "device_type: CPU\nworkloads:\n  actor: {run: 'train.py --lr 1', total: 2}\n"
    text += "  side: {run: a.b:C, is_driver: false}\n"
    expected = DLJobBuilder().device_type("CPU").role("actor").run("train.py --lr 1").total(2)
    expected = expected.role("side").run("a.b:C").not_driver().build()
    assert load_job_file(str(written(tmp_path, "sft.yml", text))).job.spec == expected.spec


@pytest.mark.parametrize("name", ["whole.json", "whole.yaml"])
def test_what_a_job_was_dumped_to_is_read_again(tmp_path, name):
    found = load_job_file(str(written(tmp_path, name, built().model_dump_json(indent=2))))
    assert (found.job.spec, found.name) == (built().spec, "whole")


def test_a_resource_edges_and_the_trainer_may_be_left_out_of_a_spec(tmp_path):
    spec = {
        "device_type": "CPU",
        "roles": [{"name": "a", "pool": "a", "on_nodes": [1], "entry": "a.b:C"}],
        "pools": [{"name": "a", "slots": [1]}],
    }
    job = load_job_file(str(written(tmp_path, "small.json", json.dumps(spec)))).job
    assert (job.spec.edges, job.spec.trainer, job.spec.role("a").resource) == ((), None, Resource())
    assert [process.label for process in job.plan().processes] == ["a"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "", "it is empty; a job is a mapping with 'workloads'"),
        ("a.yaml", "- actor\n", "it is a list; a job is a mapping with 'workloads'"),
        ("a.json", '"text"', "it is a str; a job is a mapping"),
        ("a.yaml", b"name: \xff\n", "byte 6 is not UTF-8; save the file as UTF-8"),
        ("a.yaml", "a: [1\nb: 2\n", "line 2 is not YAML: expected"),
        ("a.json", '{"a": }', "line 1 is not JSON: Expecting value"),
        ("a.yaml", "workloads: {}\n---\nworkloads: {}\n", "it has 2 YAML documents; give every job a file of its own"),
        ("a.yaml", "workloads: {a: {run: a.b:C}}\nworkloads: {}\n", "the key 'workloads' is there twice"),
        ("a.json", '{"workloads": {"a": {"total": 1, "total": 2}}}', "the key 'total' is there twice"),
        ("a.yaml", "workloads: {}\nroles: []\npools: []\n", "describes two jobs: one by 'workloads', one by 'roles'"),
        ("a.yaml", "workload: {}\n", "workload: there is no such key; did you mean 'workloads'?"),
        ("a.yaml", "device_type: CPU\n", "workloads: is missing; give each role what it runs"),
        ("a.yaml", "workloads: {a: {run: a.b:C, totl: 2}}\n", "workloads.a.totl: there is no such key; did you mean"),
        ("a.yaml", "workloads: {a: {run: a.b:C, total: '2'}}\n", "workloads.a.total='2': must be a whole number"),
        ("a.yaml", "workloads: {a: {run: a.b:C, total: yes}}\n", "workloads.a.total=True: must be a whole number"),
        ("a.yaml", "workloads: {a: {run: a.b:C, total: 0}}\n", "role 'a': total=0 must be a whole number, 1 or more"),
        ("a.yaml", "workloads: {a: 'a.b:C'}\n", "workloads.a='a.b:C': must be a mapping"),
        ("a.yaml", "workloads: {a: {run: a.b:C, entry: a.b:C}}\n", "workloads.a.entry: says the same as 'run'"),
        ("a.yaml", "workloads: {a: {run: a b c}}\n", "role 'a': "),
        ("a.yaml", "workloads: {on: {run: a.b:C}}\n", "workloads.True=True: must be text"),
        ("a.yaml", "workloads: {a: {run: a.b:C, spread: maybe}}\n", "spread='maybe': must be true, false or 'strict'"),
        ("a.yaml", "workloads: {a: {run: a.b:C, resource: 2}}\n", "workloads.a.resource=2: must be a mapping"),
        ("a.yaml", "workloads: {a: {run: a.b:C, env: {LEVEL: 1}}}\n", "role 'a': env('LEVEL': 1) must be text"),
        ("a.yaml", "workloads: {a: {total: 1}}\n", "role 'a': it has nothing to run"),
        ("a.yaml", "feeds: [[a]]\nworkloads: {a: {run: a.b:C}}\n", "feeds: ['a'] must be [source, target]"),
        ("a.yaml", "weights: [[a, b]]\nworkloads: {a: {run: a.b:C}}\n", "weights('a', 'b'): role 'b' is unknown"),
        ("a.yaml", "name: a/b\nworkloads: {a: {run: a.b:C}}\n", "name='a/b': a job's name has letters, digits"),
        ("a.yaml", "roles: []\n", "pools: is missing"),
        ("a.yaml", "roles: [{nam: a}]\npools: []\n", "roles[0].nam: there is no such key; did you mean 'name'?"),
        ("a.yaml", "roles: [1]\npools: []\n", "roles[0]=1: must be a mapping"),
        ("a.yaml", "roles: [{name: a}]\npools: []\n", "it is not what model_dump_json() writes (KeyError: 'on_nodes')"),
        ("a.yaml", "a: !!python/object:os.system {}\n", "line 1 is not YAML: could not determine a constructor"),
        ("a.yaml", "[" * 5000, "it is nested too deeply to be a job"),
        ("a.json", "[" * 100_000, "it is nested too deeply to be a job"),
        ("a.json", "9" * 5000, "it has a value that cannot be read: Exceeds the limit"),
        ("a.yaml", "a: 2026-99-99\n", "it has a value that cannot be read: month must be in 1..12"),
        ("a.toml", "", "a job is described in .yaml, .json or .py"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_named_with_the_way_out(tmp_path, name, text, message):
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as caught:
        load_job_file(str(path))
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_a_file_that_is_not_there_is_named_with_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"no/job.yaml: there is no file no/job.yaml in {tmp_path}"):
        load_job_file("no/job.yaml")


def test_a_path_is_told_from_a_setting_by_its_suffix():
    assert [names_job_file(text) for text in ("a.yaml", "b/a.py", "a.py:job", "trainer.nnodes=2", "a.txt")] == [
        *[True] * 3,
        *[False] * 2,
    ]


# -- Python

HEAD = "from hybridrl.master.jobs.builder import DLJobBuilder\nb = lambda: DLJobBuilder().device_type('CPU')\n"


@pytest.mark.parametrize(
    "text",
    [
        "def build():\n    return b().role('a').run('a.b:C').build()\n",
        "def build():\n    return b().role('a').run('a.b:C')\n",
        "job = b().role('a').run('a.b:C').build()\n",
        "builder = b().role('a').run('a.b:C')\n",
        "base = b()\nrole = base.role('a').run('a.b:C')\njob = base.build()\n",
        "import sys\ndef build(argv=None):\n    assert sys.argv[1:] == []\n    return b().role('a').run('a.b:C')\n",
    ],
)
def test_a_python_file_has_a_function_a_job_or_a_builder(tmp_path, text):
    found = load_job_file(str(written(tmp_path, "described.py", HEAD + text)))
    assert found.job.spec == DLJobBuilder().device_type("CPU").role("a").run("a.b:C").build().spec
    assert found.name == "described"


def test_classes_of_the_file_and_of_its_neighbours_are_entries_that_other_processes_find(tmp_path):
    written(tmp_path, "neighbour_of_job.py", "class Worker:\n    pass\n")
    text = "from neighbour_of_job import Worker\nclass Own:\n    pass\n"
    text += "job = b().role('own').run(Own).role('other').run(Worker).build()\n"
    path = written(tmp_path, "with_classes.py", HEAD + text)
    own, other = load_job_file(str(path)).job.spec.roles
    assert (own.entry, other.entry) == (f"{path.resolve()}:Own", "neighbour_of_job:Worker")


TWO = "first = b().role('a').run('a.b:C').build()\nsecond = b().role('a').run('a.b:D').build()\n"


def test_one_of_several_jobs_is_named(tmp_path):
    path = written(tmp_path, "two.py", HEAD + TWO)
    assert load_job_file(f"{path}:second").job.spec.roles[0].entry == "a.b:D"


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("x = 1\n", "", "has no job; define build() that returns a job"),
        (TWO, "", "has 2 jobs: first, second; name one of them: "),
        (TWO, ":third", "has no job 'third'; there are first, second"),
        ("def build(size):\n    pass\n", "", "build() requires an argument (missing a required argument: 'size')"),
        ("def build():\n    return 3\n", "", "build() returned 3; it has to return a job or a builder"),
        ("import sys\nsys.exit(3)\n", "", 'ended with exit code 3 while it was read; put its work under if'),
        ("1 / 0\n", "", "cannot be imported: ZeroDivisionError"),
        ("builder = b().role('a')\n", "", "role 'a': it has nothing to run"),
        ("builder = b().role('a').run('a b')\n", "", "role 'a': entry"),
    ],
)  # fmt: skip
def test_a_python_file_without_one_job_is_refused(tmp_path, text, suffix, message):
    path = written(tmp_path, "mistaken.py", HEAD + text)
    with pytest.raises(ConfigError) as caught:
        load_job_file(f"{path}{suffix}")
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


@pytest.mark.parametrize(("stem", "name"), [("my job", "my-job"), ("_", "job"), ("grpo.v2", "grpo-v2")])
def test_a_job_without_a_name_gets_one_from_its_file(tmp_path, stem, name):
    path = written(tmp_path, f"{stem}.yaml", "device_type: CPU\nworkloads: {a: {run: a.b:C}}\n")
    assert load_job_file(str(path)).name == name


def test_the_path_of_a_file_may_be_relative(tmp_path, monkeypatch):
    written(tmp_path, "near.py", HEAD + "job = b().role('a').run('a.b:C').build()\n")
    monkeypatch.chdir(tmp_path)
    assert load_job_file("near.py").folder == Path(tmp_path)


def test_merge_keys_that_multiply_take_no_time(tmp_path):
    file = tmp_path / "job.yaml"
    levels = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10)]
    file.write_text("\n".join(["a0: &a0 {x: 1, y: 2, z: 3}", *levels, ""]))
    began = time.monotonic()
    with pytest.raises(ConfigError, match="a0: there is no such key"):
        load_job_file(str(file))
    assert time.monotonic() - began < 20
