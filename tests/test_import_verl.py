"""`hybridrl import-verl`: bash follows a script without its programs, and our command is printed.

With what has to be decided first."""

import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from hybridrl import cli, main_ppo
from hybridrl.cli.verl import launch_script
from hybridrl.cli.verl.command import imported_command, verl_commands
from hybridrl.cli.verl.launch_script import ScriptRun, run_script, unresolved
from hybridrl.config.checks.rules import LOGGER_PACKAGES
from hybridrl.config.load import load_config
from hybridrl.config.schema.ppo import PPOConfig
from hybridrl.errors import ConfigError
from hybridrl.rewards.sandbox.job import SandboxUnavailable
from hybridrl.rewards.sandbox.local import LocalSandbox

SCRIPT = """
set -xeo pipefail
export NCCL_DEBUG=WARN   # a comment with a quote '
DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null && echo gpu || echo npu)}
N=${N:-8}
length=$((1024 * 2))
name=${NAME:-run_${N}}
stamp=run_$(git rev-parse HEAD)
train="['$HOME/a.parquet', '$HOME/b.parquet']"
EXTRA=()
case "${DEVICE}" in
    gpu)
        case "${MACHINE:-}" in
            big) N=4; if [ "$N" = 4 ]; then EXTRA+=(trainer.nnodes=2); fi ;;
            *) offload=False ;;
        esac
        ;;
    npu | cpu) offload=True ;;
esac
cat > model.py <<EOF
if this is 'not bash
EOF
DATA=(
    data.train_files="$train"
    data.max_prompt_length=${length}   # another
    data.truncation='error'
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ] && [ "$N" -gt 4 ]; then
    LAUNCH=(uv run python3)
elif [ -z "$N" ]; then
    exit 1
else
    LAUNCH=(other)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \\
    "${DATA[@]}" trainer.experiment_name=${name} trainer.project_name=${stamp} \\
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} trainer.n_gpus_per_node=$N \\
    "${EXTRA[@]}" "$@" 2>&1 | tee log.txt
"""


def run(text: str, *arguments: str, **environment: str) -> ScriptRun:
    return run_script(text, environment, path="recipe/run.sh", arguments=list(arguments))


def commands(text: str, *arguments: str, **environment: str) -> list[list[str]]:
    return run(text, *arguments, **environment).commands


def main_command(*arguments: str, **environment: str) -> list[str]:
    [found] = [words for words in commands(SCRIPT, *arguments, **environment) if "verl.trainer.main_ppo" in words]
    return found


def test_variables_arrays_branches_and_arguments_are_followed():
    assert main_command("trainer.seed=2", HOME="/data/me", DEVICE="gpu") == [
        *("uv", "run", "python3", "-m", "verl.trainer.main_ppo"),
        "data.train_files=['/data/me/a.parquet', '/data/me/b.parquet']",
        "data.max_prompt_length=2048",
        "data.truncation=error",
        "trainer.experiment_name=run_8",
        "trainer.project_name=run_\1git\2rev-parse\2HEAD\1",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "trainer.n_gpus_per_node=8",
        "trainer.seed=2",
    ]


def test_branches_inside_branches_depend_on_the_environment():
    words = main_command(DEVICE="gpu", MACHINE="big")
    assert words[0] == "other" and words[-2:] == ["trainer.n_gpus_per_node=4", "trainer.nnodes=2"]


def test_what_would_have_to_be_run_is_marked_and_the_tests_on_it_are_named():
    found = run(SCRIPT, DEVICE="$(uname)", MACHINE="big", N="3")
    [words] = [words for words in found.commands if "verl.trainer.main_ppo" in words]
    marked = {word.partition("=")[0]: unresolved(word) for word in words if unresolved(word)}
    assert marked == {"trainer.project_name": ["git rev-parse HEAD"]} and "data.max_prompt_length=2048" in words
    assert found.problems == []  # what DEVICE is was said, whatever it looks like
    [problem] = run("x=$(hostname)\ny=$x\ncase ${y} in a) z=1 ;; esac").problems
    assert problem.startswith("case ${y} in: depends on hostname, which is not run; set a variable")


@pytest.mark.parametrize(
    "test",
    [
        'x=$(hostname); [ "$x" = a ]',
        "x=$(hostname); [[ $x == a ]]",
        "x=$(hostname); test $x = a",
        "x=$(hostname); if ((${#x} > 4)); then :; fi",
        "x=($(hostname)); case ${x[0]} in a) ;; esac",
        "f() { local x=$(hostname); case $x in a) ;; esac; }; f",
        "read -r x < <(hostname); [ $x = a ]",
        "set +x; for x in $(hostname); do :; done",
        "case $(hostname) in a) ;; esac",
        "if ! hostname | tee a; then :; fi",
        "if command -v hostname; then :; fi",
        "while hostname; do break; done",
    ],
)
def test_a_decision_by_the_output_or_the_end_of_a_program_is_named(test):
    assert [problem for problem in run(test).problems if re.search(": depends on .*(hostname|command)", problem)]


@pytest.mark.parametrize(
    "test",
    [
        "x=$(hostname); x=b; [ $x = a ] || :",
        'log=run_$(git rev-parse HEAD); eval "$(conda hook)"; run | tee $log',
        'd=$(dirname "$(readlink -f "$0")"); run $d',
        "ulimit -n 65535; set -e; ulimit -c unlimited; mkdir -p logs; pushd logs; run > logs/a",
        "[[ ab =~ a(.) ]]; [ ${BASH_REMATCH[1]} = b ] && run",
        "export PATH=/usr/bin:$PATH; python3 -m a",
    ],
)
def test_what_decides_nothing_is_no_problem(test):
    found = run(test)
    assert found.problems == [] and found.commands[-1][0] in ("hostname", "run", "tee", "python3", "readlink")


def test_what_a_silent_program_prints_is_nothing_and_cat_prints_its_input():
    assert commands("run $(mkdir -p a && echo b) $(cat <<E\nc\nE\n)")[-1] == ["run", "b", "c"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("a=1 b=2; run $a${b}", ["run", "12"]),
        ("a='x y'; run $a \"$a\"", ["run", "x", "y", "x y"]),
        ("run '$a' \"\\\"q\\\"\" \\'z\\'", ["run", "$a", '"q"', "'z'"]),
        ("a=(1 2); a+=(3); run x${a[@]}", ["run", "x1", "2", "3"]),
        ("n=-3; run ${m:--1} ${n:+set} ${m-}", ["run", "-1", "set"]),
        ("k=2; run $(( (k + 1) * 4 )) $((7 / k))", ["run", "12", "3"]),
        ("[ a = b ] && x=1; run y$x", ["run", "y"]),
        ("[ a = a ] && x=1; run y$x", ["run", "y1"]),
        ("run a > out 2> err", ["run", "a"]),
        ("for i in 1 2; do x=$i; done; run $x", ["run", "2"]),
        ("run $((-7 / 2)) $((-7 % 2)) $((2 - -3)) $((9**9))", ["run", "-3", "-1", "5", "387420489"]),
        ("f() { x=1; }; f; run $x ${x/1/one}", ["run", "1", "one"]),
        ("run --name='x.yaml'\\\n    b\\\nc \"d\\\ne\" 'f'\\\n", ["run", "--name=x.yaml", "bc", "de", "f"]),
        ("if [ a = b ] && { [ -n $(hostname) ] || [ a = c ]; }; then x=1; else x=2; fi; run $x", ["run", "2"]),
        ("if [ a = b ] && grep -q x file; then x=1; else x=2; fi; run $x", ["run", "2"]),
        ("a=x; a+=y; b=(1 2); b+=3; run $a ${b[@]} $b ${b[0]}", ["run", "xy", "13", "2", "13", "13"]),
    ],
)
def test_a_line_becomes_the_words_that_bash_makes_of_it(text, words):
    assert commands(text)[-1] == words


@pytest.mark.parametrize(
    "text, words",
    [
        ("x=${x:-$(python3 -c 'import no_such_package' 2>/dev/null && echo npu || echo gpu)}; run $x", ["run", "gpu"]),
        ("run $(python -c 'import json' && echo npu || echo gpu)", ["run", "npu"]),
        ('run "$(dirname "$0")/b" $(dirname run.sh)', ["run", "recipe/b", "."]),
        ('d=$(cd -- "$(dirname "${BASH_SOURCE[0]}")/../.." >/dev/null 2>&1 && pwd); run $d/c', ["run", "/home/c"]),
        ("cd data; cd ..; run $PWD ${1} ${2:-b}", ["run", "/home/me", "8", "b"]),
        ("set -o pipefail; run $(seq 2 | head -1) $(nvidia-smi -L | wc -l)", ["run", "\1head\2-1\1", "\1wc\2-l\1"]),
        ("run $(dirname $(hostname) 2>/dev/null)", ["run", "\1dirname\2hostname\1"]),
        ("set -eu; source env.sh; . more.sh; mkdir -p a; exec run b > log 2>&1", ["run", "b"]),
        ("set -e; nohup run b > log 2>&1 &", ["nohup", "run", "b"]),
        ("python3 - <<EOF\nprint('x')\nEOF\nrun '' \"$@\"", ["run", "", "8"]),
    ],
)
def test_bash_does_what_needs_no_program(text, words):
    assert commands(text, "8", PWD="/home/me")[-1] == words


def test_a_date_is_that_of_the_reading():
    before = time.strftime("%Y%m%d")
    [[_, word]] = commands("run a_$(date +%Y%m%d_%H%M)")
    assert word[:10] in (f"a_{before}", f"a_{time.strftime('%Y%m%d')}") and len(word) == len("a_20260101_1200")


def test_a_script_knows_its_place_and_its_arguments(tmp_path):
    (tmp_path / "examples").mkdir()
    script = tmp_path / "examples" / "run.sh"
    script.write_text(
        'root=$(cd "$(dirname "$0")/.." && pwd)\npython3 -m verl.trainer.main_ppo_sync a.path=$root/x b=$1'
    )
    assert verl_commands([str(script), "c=3"], {}).commands == [[f"a.path={tmp_path}/x", "b=c=3"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('run "a', "looking for matching"),
        ("A=(1 2", "looking for matching|end of file"),
        ("if [ a = a ]; then run", "end of file"),
        ("run $((1 / 0))", "division by 0"),
        ("run ${x:?must be set}", "x: must be set"),
        ("set -u; run $nothing", "nothing: unbound variable"),
        ("/opt/python3 -m verl.trainer.main_ppo a=1", "/opt/python3: No such file"),
        ("x=$(hostname); run $((x + 1))", "syntax error"),
    ],
)
def test_a_script_that_bash_cannot_follow_has_its_words(text, said, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(
        ConfigError, match=rf"has no command of verl.trainer.main_ppo(.|\n)*run.sh: line \d+: .*({said})"
    ):
        verl_commands([str(script)], {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("while true; do :; done", "it was not done after 3 s"),
        ("A='x y'\n" + 'A="$A $A"\n' * 30 + "run $A", "too long|needed more than 512 MB|not done after"),
        ("kill -9 $$", "by signal 9"),
    ],
)
def test_a_script_without_end_or_measure_is_refused(text, said, monkeypatch):
    monkeypatch.setattr(launch_script, "LIMITS", replace(launch_script.LIMITS, wall_s=3))
    with pytest.raises(
        ConfigError, match=rf"recipe/run.sh: bash could not follow it: .*({said}).*; give its command line"
    ):
        commands(text)


def test_a_long_variable_is_followed():
    assert commands("A='x y'\n" + 'A="$A $A"\n' * 13 + "run $A")[-1][1:] == ["x", "y"] * 2**13


def test_a_script_touches_nothing_of_the_machine(tmp_path):
    mark = tmp_path / "mark"
    python = f'python3 -c \'open("{mark}", "w")\''
    text = f"touch {mark}; echo a > {mark}; /usr/bin/touch {mark}; PATH=/usr/bin; {python}; run a"
    assert commands(text)[-1] == ["run", "a"] and not mark.exists()


@pytest.mark.parametrize("content", ["x", "9", f"{'9' * 5000}", "2\\0a", "1\\0a\\0\\377\\0"])
def test_a_script_that_forges_its_commands_adds_no_error(content):
    assert len(commands(f"run a; printf '{content}' > /tmp/commands")) <= 1


def test_a_machine_without_a_sandbox_says_what_to_give(monkeypatch):
    def none(*_: object) -> None:
        raise SandboxUnavailable("this machine has no sandbox")

    monkeypatch.setattr(LocalSandbox, "run", none)
    with pytest.raises(ConfigError, match=r"no sandbox; or give its command line: hybridrl import-verl python3 -m"):
        commands("run a")


def test_the_command_is_printed_with_every_change(capsys):
    line = (
        "python3 -m verl.trainer.main_ppo model_engine=megatron data.return_raw_chat=True trainer.n_gpus_per_node=2 "
        "actor_rollout_ref.actor.use_torch_compile=False algorithm.adv_estimator=reinforce_plus_plus"
    )
    assert cli.main(["import-verl", *line.split()]) == 0
    out = capsys.readouterr().out
    comments, command = out.partition("\npython -m hybridrl.main_ppo")[::2]
    assert "model_engine=megatron -> actor_rollout_ref.actor.strategy=megatron critic.strategy=megatron" in comments
    assert "data.return_raw_chat=True: prompts are kept whole" in comments
    assert "use_torch_compile=False: models run uncompiled" in comments
    words = shlex.split(command)
    assert "actor_rollout_ref.actor.strategy=megatron" in words and "trainer.total_epochs=30" in words
    assert not any("return_raw_chat" in word for word in words)


def test_a_logger_that_the_reading_machine_lacks_is_no_refusal(monkeypatch):
    monkeypatch.setitem(LOGGER_PACKAGES, "mlflow", "a_package_that_nobody_has")
    words = ["algorithm.adv_estimator=grpo", "trainer.logger=[console,mlflow]", "trainer.n_gpus_per_node=1"]
    imported = imported_command([*words, "actor_rollout_ref.rollout.n=2"])
    assert not imported.problems and "trainer.logger=[console,mlflow]" in imported.words
    with pytest.raises(ConfigError, match="trainer.logger=mlflow: a_package_that_nobody_has is not installed"):
        main_ppo.validate_config(load_config(PPOConfig, imported.words, program="p", config_name=main_ppo.PRESET))


@pytest.mark.parametrize(
    ("package", "setting", "said"),
    [
        ("vllm", "actor_rollout_ref.rollout.name=vllm", "rollout.name=vllm: vLLM is not installed"),
        ("megatron", "model_engine=megatron", "strategy=megatron: megatron-core is not installed"),
    ],
)
def test_an_engine_that_the_reading_machine_lacks_is_no_refusal(monkeypatch, package, setting, said):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    words = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.n=2", setting]
    imported = imported_command(words)
    assert not imported.problems
    with pytest.raises(ConfigError, match=said):
        main_ppo.validate_config(load_config(PPOConfig, imported.words, program="p", config_name=main_ppo.PRESET))


def test_a_refusal_comments_the_command_out(capsys):
    words = ["verl.trainer.main_ppo", "actor_rollout_ref.actor.optim.optimizer=SGD", "trainer.n_gpus_per_node=1"]
    assert cli.main(["import-verl", *words]) == 1
    out = capsys.readouterr().out
    assert "optim.optimizer=SGD: the optimizer is AdamW; leave it out" in out
    assert all(line.startswith("#") for line in out.splitlines())


def test_unresolved_values_name_their_cause(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    [words] = verl_commands([str(script), "algorithm.adv_estimator=gae"], {"HOME": "/h"}).commands
    found = imported_command(words)
    assert any(line.startswith("trainer.project_name=run_?: depends on git rev-parse HEAD") for line in found.problems)
    assert "algorithm.adv_estimator=gae" in found.words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cfg", "job", "--", "--config-name=ppo_trainer"], ["--cfg: is a flag of Hydra; leave it out"]),
        (["reward.num_workers=2", "reward.num_workers=4"], []),
        (["actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.hybrid_engine=True"], []),
        (["trainer.nnodes=null", "actor_rollout_ref.actor.ppo_micro_batch_size=8"], ["0 processes do not divide"]),
        (["data.max_prompt_length=", "actor_rollout_ref.rollout.max_model_len=4096"], ["data.max_prompt_length"]),
        (["actor_rollout_ref.actor.optim.optimizer=SGD", "algorithm.no_such_key=3"], ["SGD", "algorithm.no_such_key"]),
        (["critic.model.lora.rank=0"], []),
    ],
)
def test_words_that_hydra_takes_are_taken_or_named(words, said):
    given = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.n=2", *words]
    problems = imported_command(given).problems
    assert all(any(text in problem for problem in problems) for text in said) and bool(problems) == bool(said)


def test_verls_clip_ratio_alone_has_no_effect():
    found = imported_command(["actor_rollout_ref.actor.clip_ratio=0.4", "trainer.n_gpus_per_node=1"])
    assert {"actor_rollout_ref.actor.clip_ratio_low=0.2", "actor_rollout_ref.actor.clip_ratio_high=0.2"} <= {
        *found.defaults
    }


def test_a_script_without_a_command_of_verl_is_refused(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("echo hello\n")
    with pytest.raises(ConfigError, match="has no command of verl.trainer.main_ppo"):
        verl_commands([str(script)], {})


def test_a_command_line_in_one_word_is_divided_and_refused_without_the_end_of_a_quote():
    assert verl_commands(["python3 -m verl.trainer.main_ppo a='x y' b=2"], {}).commands == [["a=x y", "b=2"]]
    longest_name = 255  # of a file; a whole command line is asked for as one
    values = [f"a.b{number}=1" for number in range(longest_name)]
    assert verl_commands([" ".join(["python3 -m verl.trainer.main_ppo", *values])], {}).commands == [values]
    with pytest.raises(ConfigError, match="has no command of verl"):
        verl_commands([" ".join(["python3 -m others", *values])], {})
    with pytest.raises(ConfigError, match="is no command line .*No closing quotation"):
        verl_commands(["verl.trainer.main_ppo a='x"], {})


HOSTILE = ["{mark}", "\n{mark}\n", "\r{mark}\n", "'\n{mark}\n'", "\x0b\n{mark}", "\u2028{mark}", "\\\n{mark}\n#"]
PLACES = [
    "verl.trainer.main_ppo trainer.n_gpus_per_node=1 trainer.project_name='{text}'",
    "verl.trainer.main_ppo trainer.n_gpus_per_node=1 'x{text}=3'",
    "verl.trainer.main_ppo trainer.n_gpus_per_node=1 trainer.seed=$(date {text})",
    "verl.trainer.main_ppo --config-name='{text}' trainer.n_gpus_per_node=1",
    "verl.trainer.main_ppo trainer.n_gpus_per_node=1 'data.return_raw_chat={text}'",
]


def test_what_is_printed_runs_nothing_of_the_script(tmp_path, capsys):
    mark = tmp_path / "mark"
    for place in PLACES:
        for text in HOSTILE:
            script = tmp_path / "run.sh"
            line = text.format(mark=f"touch {mark}").replace("'", "'\"'\"'" if "'" in place else "'")
            script.write_text(place.format(text=line))
            code = cli.main(["import-verl", str(script)])
            printed = capsys.readouterr()
            assert not set(printed.out + printed.err) - {"\n"} & set(map(chr, range(32)))
            assert (printed.err == "") == bool(printed.out)
            if code:
                assert all(line.startswith("#") for line in printed.out.splitlines()), (place, text)
                subprocess.run(["bash", "-c", printed.out], check=True, cwd=tmp_path, timeout=20)
            assert "\n" not in text or code and not mark.exists()
