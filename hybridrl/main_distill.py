"""`python -m hybridrl.main_distill key=value ...`: on-policy distillation of a teacher into the policy.

`main_ppo` with the preset `distill_trainer`: no rewards and no critic, and a teacher is required:
`distillation.teacher_models.teacher_model.model_path`. Runs in the driver.
"""

from hybridrl.driver.entry import start  # isort: split

from collections.abc import Sequence

from hybridrl import main_ppo

PROGRAM, PRESET = "python -m hybridrl.main_distill", "distill_trainer"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (the command line's by default) and return its exit code."""
    return main_ppo.main(argv, program=PROGRAM, preset=PRESET)


if __name__ == "__main__":
    start(main)
