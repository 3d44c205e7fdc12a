from .recorder import StepRecorder as StepRecorder
