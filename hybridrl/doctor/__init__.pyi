from .finding import Finding as Finding
from .machine import examine_machine as examine_machine
from .run import examine_run as examine_run
