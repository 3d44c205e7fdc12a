from .elastic import ElasticRanks as ElasticRanks
from .final_report import report_final_decision as report_final_decision
from .master_link import run_under_master as run_under_master
from .step_snapshot import is_supervisable as is_supervisable
from .step_snapshot import with_resume_overrides as with_resume_overrides
from .supervised_state import load_supervised_state as load_supervised_state
