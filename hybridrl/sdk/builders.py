"""The builders of submitted jobs under the SDK's name.

Re-exports only; the code is in `master/jobs/builder.py`.
"""

from hybridrl.master.jobs.builder import DLJob, DLJobBuilder, RLJob, RLJobBuilder

__all__ = ["DLJob", "DLJobBuilder", "RLJob", "RLJobBuilder"]
