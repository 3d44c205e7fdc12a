"""The `hybridrl` command: training, data, models, jobs, graphs, timelines, a page about runs, plans, verl.

    hybridrl train DATA MODEL [key=value ...] a training run in one line, with settings for this machine
    hybridrl init NAME                        a directory with a reward function, a stage, data, a run and tests
    hybridrl data list                        the known tasks, and how their data are made
    hybridrl data inspect FILE                a file's rows, columns and lengths, and what would be refused
    hybridrl chat MODEL                       a conversation with a model, a checkpoint or an endpoint
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
    hybridrl view RUN ...                     a web page about runs: curves, samples, settings, timeline, failures
    hybridrl export CHECKPOINT DIRECTORY      a checkpoint's policy as Hugging Face safetensors, verified
    hybridrl serve MODEL                      a model, or a checkpoint's policy, behind an OpenAI-compatible endpoint
    hybridrl serve-training MODEL             a model that clients train and sample by Tinker's API
    hybridrl doctor [RUN]                     what is wrong with this machine or with a run, and what to change
    hybridrl replay RUN STEP                  a step that a run has kept, again in one process, and what differs
    hybridrl eval TASK MODEL_OR_URL           how often a model answers right, with confidence intervals and samples
    hybridrl plan key=value ...               the memory that a job needs of its devices, and settings that fit
    hybridrl import-verl SCRIPT               a launch script or a command line of verl as ours, every change explained

JOB is a run, a job's name, or a run's directory. `arguments.py` has the commands and their arguments. What runs them is
listed in `__init__.pyi`, and loaded when it is first asked for: torch takes seconds, and `--help` should not.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
