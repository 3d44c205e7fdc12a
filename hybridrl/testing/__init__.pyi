from .conformance import ConformanceError as ConformanceError
from .engine import check_engine as check_engine
from .rollout import check_rollout as check_rollout
from .transport import check_transport as check_transport
