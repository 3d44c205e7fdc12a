"""The `hybridrl` command: inspect, submit, stop and resume jobs, draw graphs and timelines, export and serve models.

    hybridrl job submit FILE                  start the job that a file describes: YAML, JSON, or Python with a builder
    hybridrl job graph FILE                   its roles, what flows between them, and their placement; starts nothing
    hybridrl job graph key=value ...          the stages of a PPO job, their columns and placement; starts nothing
    hybridrl job ls                           the jobs that run on a Ray cluster
    hybridrl job status JOB                   a job's state, processes, last commit and failures, also after its end
    hybridrl job logs JOB [--process NAME]    the events of a job, or what one of its processes has printed
    hybridrl job stop JOB                     stop a job as SIGTERM would
    hybridrl job resume RUN                   resume a run from its last checkpoint
    hybridrl job states                       states of a job, its roles and workers; what follows a failure
    hybridrl trace RUN [--output FILE]        the timeline of a run with trainer.trace=true, for Perfetto
    hybridrl export CHECKPOINT DIRECTORY      a checkpoint's policy as Hugging Face safetensors, verified
    hybridrl serve MODEL                      a model, or a checkpoint's policy, behind an OpenAI-compatible endpoint

JOB is a run, a job's name, or a run's directory. Modules that import torch are imported by the commands that need them:
torch takes seconds, and `--help`, `trace` and a mistake should not.
"""

from hybridrl.cli.command import main
from hybridrl.cli.graph import job_graph
from hybridrl.cli.models import export_checkpoint

__all__ = ["export_checkpoint", "job_graph", "main"]
