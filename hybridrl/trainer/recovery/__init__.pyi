from .elastic import ElasticRanks as ElasticRanks
from .master_link import report_final_decision as report_final_decision
from .master_link import run_under_master as run_under_master
from .nonfinite import NonFiniteGuard as NonFiniteGuard
from .policies import is_supervisable as is_supervisable
from .policies import with_resume_overrides as with_resume_overrides
from .snapshots import load_surviving_state as load_surviving_state
from .step_retry import StepRetry as StepRetry
